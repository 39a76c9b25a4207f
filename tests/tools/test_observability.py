"""The examples for watching and deploying are what their tools take: compose, Prometheus, Grafana, Kubernetes."""

from __future__ import annotations

import json
import lzma
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from benchmarks.paths import REPOSITORY
from sglang_diffkv import __version__
from sglang_diffkv.releases import TESTED_VERSIONS
from tests.tools.promql import Expression, PromQLError

WATCHED, KUBERNETES = REPOSITORY / "examples" / "observability", REPOSITORY / "examples" / "kubernetes"
DASHBOARD = REPOSITORY / "examples" / "grafana" / "diffkv.json"
SCHEMAS = REPOSITORY / "tests" / "data" / "schemas"
KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
}
TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": TEXT}
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": TEXT, "labels": LABELS}},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["matchLabels"],
                    "properties": {"matchLabels": LABELS},
                },
                "scrapeProtocols": {"type": "array", "items": {"enum": ["PrometheusText0.0.4"]}},
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {"port": TEXT, "path": TEXT, "interval": {"pattern": r"^\d+(ms|s|m|h)$"}},
                    },
                },
            },
        },
    },
}
"""Of the Prometheus operator's resource, the fields that are used."""


class _OneKeyEach(yaml.SafeLoader):
    """YAML whose objects name no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        assert len(found) == len(node.value), f"a key is there twice: {sorted(key.value for key, _ in node.value)}"
        return found


def read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), _OneKeyEach)


def schema(name: str) -> Any:
    return json.loads(lzma.decompress((SCHEMAS / f"{name}.json.xz").read_bytes()))


def rules() -> list[dict[str, Any]]:
    return [rule for group in read(WATCHED / "alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, str]]:
    """The title and query of each line of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]


def expressions() -> list[str]:
    """Of all queries of the dashboard and all alert rules."""
    return [*(query for _, query in panels()), *(rule["expr"] for rule in rules())]


def metric_names() -> set[str]:
    """All metrics that they name, but for those of Prometheus itself."""
    return {name for text in expressions() for name in Expression(text).metrics} - {"up"}


# Docker compose, Prometheus, Grafana


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What is mounted from a file, by its path in the container: the file and the mode."""
    found = [text.split(":") for text in service["volumes"]]
    return {x[1]: (x[0], x[2] if len(x) > 2 else "rw") for x in found}


def test_compose_keeps_to_the_specification() -> None:
    compose, known = read(WATCHED / "compose.yml"), schema("compose-spec")
    checker = jsonschema.Draft201909Validator(known)
    checker.validate({key: value for key, value in compose.items() if key != "name"})
    for wrong in ({"services": {"a": {"imagine": "b"}}}, {"services": {"a": {"ports": "1"}}}, {"service": {}}):
        with pytest.raises(jsonschema.ValidationError):
            checker.validate(wrong)
    used = {text.partition(":")[0] for x in compose["services"].values() for text in x["volumes"]}
    assert {*compose["volumes"]} == {name for name in used if not name.startswith(".")}
    for service in compose["services"].values():
        assert {*service.get("depends_on", {})} <= {*compose["services"]}


def test_compose_itself_takes_the_file(program: Callable[[str], str], tmp_path: Path) -> None:
    """``docker-compose config``, which needs no engine: it finds each file, and refuses what it does not know."""
    compose = read(WATCHED / "compose.yml")
    file = tmp_path / "compose.yml"
    place = ["-p", compose.pop("name"), "-f", str(file), "--project-directory", str(WATCHED)]  # 1.29 knows no `name`

    def config(data: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file.write_text(yaml.safe_dump(data), encoding="utf-8")
        return subprocess.run([program("docker-compose"), *place, "config"], capture_output=True, text=True)

    taken = config(compose)
    assert taken.returncode == 0, taken.stderr
    assert {*yaml.safe_load(taken.stdout)["services"]} == {*compose["services"]}
    for service in compose["services"].values():
        for source, _ in mounts(service).values():
            assert not source.startswith(".") or str((WATCHED / source).resolve()) in taken.stdout
    compose["services"]["grafana"]["depends_on"] = ["nobody"]
    refused = config(compose)
    assert refused.returncode != 0 and "nobody" in refused.stderr


def test_what_compose_starts_is_pinned_and_closed() -> None:
    for name, service in read(WATCHED / "compose.yml")["services"].items():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"]), f"{name}: a whole version"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), f"{name}: this machine alone"
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert not [key for key in service.get("environment", {}) if re.search("PASSWORD|SECRET|TOKEN|KEY", key)]
        for target, (source, mode) in mounts(service).items():
            if source.startswith("."):
                assert (WATCHED / source).resolve().is_file(), f"{name}: {source} is no file"
                assert mode == "ro", f"{name} may write {source}"
            else:
                assert mode == "rw" and target in ("/prometheus", "/var/lib/grafana")


def test_prometheus_finds_its_rules_and_grafana_its_dashboard() -> None:
    services = read(WATCHED / "compose.yml")["services"]
    prometheus, grafana = services["prometheus"], services["grafana"]
    config = read(WATCHED / "prometheus.yml")
    where = Path(next(x for x in prometheus["command"] if x.startswith("--config.file=")).partition("=")[2])
    assert mounts(prometheus)[str(where)][0] == "./prometheus.yml"
    for name in config["rule_files"]:
        assert mounts(prometheus)[str(where.parent / name)] == (f"./{name}", "ro")
    (job,) = config["scrape_configs"]
    assert job["scrape_protocols"] == ["PrometheusText0.0.4"] and job.get("metrics_path", "/metrics") == "/metrics"
    (host,) = (target for x in job["static_configs"] for target in x["targets"])
    assert host.partition(":")[0] in {text.partition(":")[0] for text in prometheus["extra_hosts"]}
    (source,) = read(WATCHED / "grafana" / "datasources.yml")["datasources"]
    assert source["isDefault"] and source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    (provider,) = read(WATCHED / "grafana" / "dashboards.yml")["providers"]
    there = next(target for target, (file, _) in mounts(grafana).items() if file.endswith("diffkv.json"))
    assert str(Path(there).parent) == provider["options"]["path"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == there
    provisioned = "/etc/grafana/provisioning/"
    assert {Path(x).parent.name for x in mounts(grafana) if x.startswith(provisioned)} == {"datasources", "dashboards"}
    variables = {x["name"]: x for x in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    assert variables["datasource"]["query"] == source["type"]


def test_alerts_say_what_and_how_bad() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names)
    for rule in rules():
        assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and re.fullmatch(
            r"\d+m", rule.get("for", "1m")
        )
        summary = rule["annotations"]["summary"]
        assert summary.endswith(".") and summary.count("{{") == summary.count("}}") > 0
        assert {*re.findall(r"\$labels\.(\w+)", summary)} <= {"instance"}
        found = Expression(rule["expr"])
        assert not found.labels or "instance" in found.labels, "its summary names the instance"
    wanted = (
        "faults",
        "num_retracted",
        "diffkv_ratio ",
        "cached_tokens",
        "num_queue_reqs",
        "http_responses",
        "diffkv_host_bytes",
    )
    texts = [rule["expr"].replace("[", " [") for rule in rules()]
    assert all(any(word in text for text in texts) for word in wanted)


def promtool(program: Callable[[str], str], *args: str | Path) -> tuple[int, str]:
    """Its exit status and all that it says."""
    command = [program("promtool"), *args]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return told.returncode, told.stdout


def test_each_alert_fires_on_its_bad_day_and_only_then(program: Callable[[str], str]) -> None:
    """By Prometheus's own evaluation: a good day for all rules, and for each a day on which it fires, and is over."""
    status, told = promtool(program, "check", "rules", WATCHED / "alerts.yml")
    assert status == 0 and f"{len(rules())} rules found" in told, told
    status, told = promtool(program, "test", "rules", WATCHED / "alerts_test.yml")
    assert status == 0, told
    days = [case for day in read(WATCHED / "alerts_test.yml")["tests"] for case in day.get("alert_rule_test", [])]
    for rule in rules():
        fires = [bool(case["exp_alerts"]) for case in days if case["alertname"] == rule["alert"]]
        assert fires == [False, True, False], f"{rule['alert']}: before, meanwhile and behind"


@pytest.mark.parametrize("change", ["fires always", "never fires", "does not wait"])
def test_a_rule_that_is_wrong_is_found(program: Callable[[str], str], change: str, tmp_path: Path) -> None:
    """Each of them, by its own day."""
    whole, wrong = read(WATCHED / "alerts.yml"), []
    for rule in (rule for group in whole["groups"] for rule in group["rules"]):
        if change == "does not wait":
            if rule.pop("for", None) is None:
                continue
        else:
            rule["expr"] = "vector(1)" if change == "fires always" else f"({rule['expr']}) and on () vector(1) < 0"
        wrong.append(rule["alert"])
    days = read(WATCHED / "alerts_test.yml")
    days["tests"] = days["tests"][1:]
    for name, data in (("alerts.yml", whole), ("alerts_test.yml", days)):
        (tmp_path / name).write_text(yaml.safe_dump(data), encoding="utf-8")
    status, told = promtool(program, "test", "rules", tmp_path / "alerts_test.yml")
    assert status == 1
    assert {*re.findall(r"alertname: (\w+), time", told)} == {*wrong}


@pytest.mark.parametrize("text", expressions())
def test_queries_are_promql(text: str) -> None:
    found = Expression(text)
    assert found.metrics
    for name, matchers in found.selectors:
        assert re.fullmatch(r"up|(diffkv_|sglang:)[a-z0-9_]+", name)
        assert all(label in KNOWN_LABELS for label, _, _ in matchers)


KNOWN_LABELS = {"model_name", "instance", "owner", "tier", "kind", "outcome", "job", "status_code", "endpoint"}


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "rate(a)",
        "sum(a",
        "a)",
        "a[5m]",
        "rate(a[5x])",
        "rate(a[5])",
        "abs(a[5m])",
        "a{b=1}",
        'a{b=~"("}',
        'a{b="c"',
        "unknown(a)",
        "a b",
        "a and 1",
        "a >",
        "rate(a[5m]) + a[5m]",
        "sum(rate(a[5m]) by (x)",
        "histogram_quantile(0.9, a[5m])",
        "rate((a + b)[5m])[1m]",
    ],
)
def test_what_is_no_promql_is_found(wrong: str) -> None:
    with pytest.raises((PromQLError, re.error)):
        Expression(wrong)


def test_a_panel_explains_a_metric_of_sglang_that_means_something_else_here() -> None:
    """docs/operate.md has the table; where such a number is shown, so is what it means."""
    operate = (REPOSITORY / "docs" / "operate.md").read_text(encoding="utf-8")
    section = operate.partition("## SGLang's metrics under the plugin")[2].partition("\n## ")[0]
    other = {*re.findall(r"`(sglang:\w+)`", section)}
    assert len(other) > 5
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = {
        name: panel for panel in panels for x in panel.get("targets", []) for name in Expression(x["expr"]).metrics
    }
    for name in other & {*shown}:
        text = shown[name].get("description", "")
        assert name in text and "high tier" in text, f"panel {shown[name]['title']!r} does not explain {name}"
    assert other & {*shown}


# Kubernetes


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in read(KUBERNETES / "kustomization.yml")["resources"]:
        yield name, read(KUBERNETES / name)


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (x for _, x in manifests() if x["kind"] == kind)
    return found


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValidationError unless a cluster would take it."""
    if manifest.get("kind") == "PodMonitor":
        jsonschema.validate(manifest, POD_MONITOR)
        return
    known = schema("kubernetes-1.33")
    jsonschema.validate(manifest, {**known, "$ref": f"#/definitions/{KINDS[manifest['kind']]}"})


def test_manifests_are_taken_by_a_cluster() -> None:
    listed = {name for name, _ in manifests()}
    assert listed | {"kustomization.yml"} == {path.name for path in KUBERNETES.iterdir()}
    for name, manifest in manifests():
        check_manifest(manifest)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"]), name


@pytest.mark.parametrize("change", ["tolerate", "image", "ports", "probe", "monitor"])
def test_a_manifest_that_is_wrong_is_found(change: str) -> None:
    manifest = of_kind("PodMonitor" if change == "monitor" else "Deployment")
    if change == "monitor":
        manifest["spec"]["podMetricEndpoints"] = manifest["spec"].pop("podMetricsEndpoints")
    elif change == "tolerate":
        manifest["spec"]["template"]["spec"]["tolerate"] = []
    else:
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        container.update({"image": {"image": 3}, "ports": {"ports": [{"name": "x"}]}, "probe": {"probe": {}}}[change])
    with pytest.raises(jsonschema.ValidationError):
        check_manifest(manifest)


def test_service_and_monitor_find_the_pods() -> None:
    deployment, service, monitor = (of_kind(x) for x in ("Deployment", "Service", "PodMonitor"))
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    ports = {x["name"]: x["containerPort"] for x in container["ports"]}
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        monitor["spec"]["selector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels
    assert {x["targetPort"] for x in service["spec"]["ports"]} <= {*ports}
    assert {x["port"] for x in monitor["spec"]["podMetricsEndpoints"]} <= {*ports}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        check = container[probe]
        assert check["httpGet"]["path"] == "/health" and check["httpGet"]["port"] in ports
        assert check["timeoutSeconds"] > 20, "SGLang's /health waits so long for a token"


def test_the_pod_has_a_gpu_its_model_and_arguments_that_sglang_knows() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    claims = {x["name"]: x["persistentVolumeClaim"] for x in pod["volumes"] if "persistentVolumeClaim" in x}
    volumes = {x["name"] for x in pod["volumes"]}
    assert {x["name"] for x in container["volumeMounts"]} == volumes
    assert all(claim["claimName"] == of_kind("PersistentVolumeClaim")["metadata"]["name"] for claim in claims.values())
    (model,) = (x for x in container["volumeMounts"] if x["name"] in claims)
    args = container["args"]
    assert model["readOnly"] and args[args.index("--model-path") + 1].startswith(model["mountPath"] + "/")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    entry = (REPOSITORY / "Containerfile").read_text().partition("ENTRYPOINT ")[2]
    given = [*json.loads(entry.splitlines()[0])[3:], *args]
    ports = {x["containerPort"] for x in container["ports"]}
    assert int(given[given.index("--port") + 1]) in ports and given[given.index("--attention-backend") + 1] == "diffkv"
    for version in TESTED_VERSIONS:
        fields = (REPOSITORY / "tests" / "data" / "server_args" / f"{version}.txt").read_text().split()
        options = {x[2:].replace("-", "_") for x in given if x.startswith("--")}
        assert options <= {*fields}, f"SGLang {version} has no {options - {*fields}}"
    secrets = [x["valueFrom"]["secretKeyRef"] for x in container["env"] if "valueFrom" in x]
    assert (
        len(secrets) == 1
        and f"secret generic {secrets[0]['name']} --from-literal={secrets[0]['key']}="
        in (KUBERNETES / "deployment.yml").read_text()
    ), "how it is made is said"
    named = {x["name"] for x in container["env"]}
    assert {*re.findall(r"\$\((\w+)\)", " ".join(args))} <= named


def test_the_image_is_of_this_version() -> None:
    (image,) = read(KUBERNETES / "kustomization.yml")["images"]
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert image == {"name": container["image"], "newTag": __version__}
