"""Worker for Pellucid: a client of a running server, which is named by its address."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from protocol import serve

from pellucid_client import AsyncClient


def main() -> None:
    address, loop = sys.argv[1], asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    client = AsyncClient(address)
    server = loop.run_until_complete(client.server_info())
    (model,) = loop.run_until_complete(client.models())

    async def one(prompt: Sequence[int], new: int, first: Callable[[], None]) -> list[int]:
        output: list[int] = []
        async for chunk in client.generate(list(prompt), max_new_tokens=new, temperature=0, ignore_eos=True):
            if chunk.token_ids and not output:
                first()
            output += chunk.token_ids
        return output

    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        async def everything() -> list[list[int]]:
            return list(await asyncio.gather(*(one(prompt, new, first) for prompt in prompts)))

        return loop.run_until_complete(everything())

    serve("pellucid", f"{server.version} {server.kernels} {server.dtype}", model.vocab_size, generate)


main()
