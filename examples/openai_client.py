"""A chat with a DiffKV server through the OpenAI client: the first reply comes as a stream, the second turn finds the
first in the prefix cache.

Start a server, then name it::

    python -m sglang.launch_server --model-path examples/models/nano --attention-backend diffkv --enable-cache-report
    python examples/openai_client.py --url http://127.0.0.1:30000

A server's key is read from SGLANG_API_KEY.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

PROMPT = "Remember these words: " + " ".join(f"word{x}" for x in range(60)) + ". Compute 12 * 7."
FOLLOW_UP = "Compute 9 * 8."


@dataclass
class Turn:
    """A reply, and how many of the prompt's tokens came from the prefix cache (0 if the server does not say)."""

    text: str
    prompt_tokens: int
    cached_tokens: int


def chat(url: str, prompt: str = PROMPT, follow_up: str = FOLLOW_UP, max_tokens: int = 64) -> list[Turn]:
    """Two turns, greedy, against the server or router at ``url``."""
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SGLANG_API_KEY") or "none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    common: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": max_tokens}
    text, usage = "", None
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **common
    )  # fmt: skip
    for part in stream:
        text += (part.choices[0].delta.content or "") if part.choices else ""
        usage = part.usage or usage
    turns = [_turn(text, usage)]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
    reply = client.chat.completions.create(messages=messages, **common)
    return [*turns, _turn(reply.choices[0].message.content or "", reply.usage)]


def _turn(text: str, usage: Any) -> Turn:
    details = usage.prompt_tokens_details
    return Turn(text, usage.prompt_tokens, (details.cached_tokens or 0) if details else 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    args = parser.parse_args(argv)
    for number, turn in enumerate(chat(args.url), 1):
        print(f"turn {number}: {turn.prompt_tokens} prompt tokens, {turn.cached_tokens} of them cached")
        print(turn.text.strip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
