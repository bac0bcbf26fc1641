"""The synchronous client: stream, whole answer, errors. Run it with `python examples/python_sync.py [HOST:PORT]`."""

import sys

from pellucid_client import Client, InvalidRequest, Overloaded

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(address) as client:
    client.wait_until_ready(30)

    for chunk in client.generate("今天天气", temperature=0.8, seed=1, max_new_tokens=40):
        print(chunk.text, end="", flush=True)
    print()

    answer = client.generate("今天天气", temperature=0, stop="。").result()
    print(answer.text, answer.finish.reason, answer.usage.output_token_count)

    # Leaving the block ends the request in the server too.
    with client.generate("今天天气", timeout=5) as stream:
        for _ in stream:
            if len(stream.token_ids) > 3:
                break

    try:
        client.generate("今天天气", top_p=0).result()
    except InvalidRequest as error:
        for violation in error.violations:
            print(f"{violation.field}: {violation.description}")
    except Overloaded as error:
        print(f"the queue is full; try again in {error.retry_after} s")
