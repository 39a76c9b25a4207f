#!/usr/bin/env bash
# SGLang's serving benchmark measures an admission of requests that users do not get, and which changed between releases.
#
# Seen 2026-11-30 with SGLang 0.5.17 and 0.5.23, on a CPU; the figures of the last part on an H200.
#
# Expected: how much of the KV cache a running request may take yet is estimated alike for the benchmark's requests and
#   for users', and alike in both releases, so that throughput figures of the two can be compared.
# Happens: SGLang's client sends ignore_eos unless it is told not to. 0.5.17 expects the same share of every reply, here
#   .4 of 1,024 tokens, and gives requests up where that was too little. 0.5.23 expects .4 of a user's reply, and all of
#   one with ignore_eos. So with the benchmark's own requests it admits fewer of them at once.
# Why it matters: what a smaller KV cache gains is more requests at once. On an H200, of 128 requests of 1,024 + 1,024
#   tokens over a compressed cache 0.5.17 ran all at once and gave none up, 0.5.23 ran 123 and then five: 10,591 and
#   7,265 tokens a second. Whoever compares caches or releases by such a load measures this rule. Loads in which requests
#   always wait show less of it.
#
# Exit status 0: as described. 1: it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check --quiet install"
for release in 0.5.17 0.5.23; do $pip --no-deps --target "$folder/$release" "sglang==$release"; done
cat > "$folder/check.py" <<'PYTHON'
# The method alone, as the release has it: the module would need torch and two dozen other packages.
import ast
import json
import sys
from types import SimpleNamespace

source = open(f"{sys.argv[1]}/sglang/srt/managers/schedule_policy.py", encoding="utf-8").read()
(adder,) = (x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "PrefillAdder")
(method,) = (x for x in adder.body if getattr(x, "name", "") == "_get_running_request_total_token_offset")
for annotated in (*method.args.args, method):
    annotated.annotation = annotated.returns = None
names = {"CLIP_MAX_NEW_TOKENS": 4096}
exec(compile(ast.Module([method], []), "schedule_policy.py", "exec"), names)

expected = []
for ignore_eos in (False, True):
    asked = SimpleNamespace(max_new_tokens=1024, ignore_eos=ignore_eos)
    request = SimpleNamespace(sampling_params=asked, output_ids=[])
    expected.append(names[method.name](SimpleNamespace(new_token_ratio=0.4), request))
print(json.dumps(expected))
PYTHON
found=""
for release in 0.5.17 0.5.23; do
  line=$("$folder/venv/bin/python" "$folder/check.py" "$folder/$release")
  echo "SGLang $release: tokens expected of a reply of 1,024, without and with ignore_eos: $line"
  found="$found$line"
done
client=$(grep -om1 'payload\["ignore_eos"\] = not args.disable_ignore_eos' "$folder/0.5.23/sglang/benchmark/serving.py" || true)
echo "SGLang's client: ${client:-does not ask for ignore_eos by itself}"
[ "$found" = "[409.6, 409.6][409.6, 1024.0]" ] && [ -n "$client" ] && echo "as described" || { echo "changed"; exit 1; }
