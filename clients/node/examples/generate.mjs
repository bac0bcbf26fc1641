// Streams an answer, then asks again for the whole of it. Build the client first: npm ci && npm run build
//
//     node examples/generate.mjs [HOST:PORT]

import { Client, InvalidRequest } from "pellucid-client";

const client = new Client(process.argv[2] ?? "127.0.0.1:50051");

for await (const chunk of client.generate("今天天气", { temperature: 0.8, seed: 1, maxNewTokens: 40 })) {
  process.stdout.write(chunk.text);
}
process.stdout.write("\n");

const answer = await client.generate("今天天气", { temperature: 0, stop: "。" }).result();
console.log(answer.text, answer.finish.reason, answer.usage.outputTokenCount);

// A deadline of five seconds, and a signal that ends the request in the server as well.
const controller = new AbortController();
const stream = client.generate("今天天气", { signal: controller.signal, timeoutMs: 5000 });
for await (const chunk of stream) {
  if (stream.tokenIds.length > 3) break; // Leaving the loop does the same.
}

try {
  await client.generate("今天天气", { topP: 0 }).result();
} catch (error) {
  if (!(error instanceof InvalidRequest)) throw error;
  for (const { field, description } of error.violations) console.log(`${field}: ${description}`);
}

client.close();
