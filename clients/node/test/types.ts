/** Never run: `tsc` fails where a line marked as an error is none, or another one is. */

import { Client, type Chunk, type Completion, InvalidRequest, PellucidError } from "pellucid-client";

export async function typed(client: Client): Promise<void> {
  for await (const chunk of client.generate("天", { temperature: 0, seed: 1n })) {
    const { text, tokenIds }: Chunk = chunk;
    text satisfies string;
    tokenIds satisfies number[];
    chunk.finish?.reason satisfies string | undefined;
  }
  const answer: Completion = await client.generate([1, 2], { stop: "。", context: "reject" }).result();
  answer.prompt.sampling.seed satisfies bigint | undefined;
  new InvalidRequest("x", { code: 3 }) satisfies PellucidError;

  // @ts-expect-error a prompt is text or numbers
  client.generate(["天"]);
  // @ts-expect-error no such option
  client.generate("天", { temprature: 1 });
  // @ts-expect-error not a policy
  client.generate("天", { context: "wrap" });
  // @ts-expect-error a stream is not its result
  const text: string = client.generate("天").text.length;
}
