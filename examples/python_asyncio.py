"""The asyncio client: many requests at once. Run it with `python examples/python_asyncio.py [HOST:PORT …]`.

Several addresses are servers that serve the same; the requests go to them in turn.
"""

import asyncio
import sys

from pellucid_client import AsyncClient, PellucidError

addresses = sys.argv[1:] or ["127.0.0.1:50051"]
PROMPTS = ["今天天气", "明天", "我们", "他说"]


async def ask(client: AsyncClient, prompt: str) -> str:
    try:
        answer = await client.generate(prompt, temperature=0, max_new_tokens=20, timeout=30).result()
    except PellucidError as error:
        return f"{prompt}: {error.code.name} {error.message}"
    return f"{prompt}{answer.text} ({answer.finish.reason})"


async def main() -> None:
    async with AsyncClient(addresses) as client:
        await client.wait_until_ready(30)
        for line in await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS)):
            print(line)

        async for chunk in client.generate("今天天气", temperature=0.8, seed=1, max_new_tokens=40):
            print(chunk.text, end="", flush=True)
        print()


asyncio.run(main())
