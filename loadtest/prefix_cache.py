"""What the prefix cache saves: time to first token of a prompt that is new, and of the same prompt again.

usage: prefix_cache.py [ADDRESS] [--prompt-tokens 4000] [--rounds 5]

Asks a running server (default 127.0.0.1:50051), one request at a time. Each round has a prompt of its own, so cold and
warm requests alternate in one run. Prints the medians and their ratio; ends with 1 where outputs differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid_client import Client

NEW_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """One request's."""

    seconds_to_first_token: float
    cached_tokens: int
    token_ids: list[int]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    cold, warm = [], []
    try:
        client = Client(options.address)
    except ValueError as error:
        parser.error(str(error))
    with client:
        client.wait_until_ready(60)
        vocab_size = client.model().vocab_size
        for _ in range(options.rounds):
            prompt = [random.randrange(vocab_size) for _ in range(options.prompt_tokens)]
            cold.append(_ask(client, prompt))
            warm.append(_ask(client, prompt))
    before, after = (statistics.median(each.seconds_to_first_token for each in answers) for answers in (cold, warm))
    print(f"prompts of {options.prompt_tokens} tokens, {options.rounds} rounds, medians of the time to first token:")
    print(f"  first time  {before * 1000:8.1f} ms, {max(each.cached_tokens for each in cold)} tokens from the cache")
    print(f"  again       {after * 1000:8.1f} ms, {min(each.cached_tokens for each in warm)} tokens from the cache")
    print(f"  ratio       {before / after:8.1f}")
    if [each.token_ids for each in cold] != [each.token_ids for each in warm]:
        print("prefix_cache: outputs of the same prompt differ", file=sys.stderr)
        return 1
    return 0


def _ask(client: Client, prompt: list[int]) -> Answer:
    began = time.perf_counter()
    stream = client.generate(prompt, temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    next(stream)
    seconds = time.perf_counter() - began
    result = stream.result()
    return Answer(seconds, result.usage.cached_token_count, list(result.token_ids))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
