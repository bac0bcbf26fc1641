/** Against a live server: PELLUCID_SERVER is its address, PELLUCID_METRICS that of its metrics. */

import assert from "node:assert/strict";
import { after, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import {
  Cancelled, type Chunk, Client, ConnectionFailed, DeadlineExceeded, InvalidRequest, ModelNotFound, PellucidError, PromptTooLong, RequestIdInUse,
} from "pellucid-client";

const { PELLUCID_SERVER: address = "", PELLUCID_METRICS: metrics = "" } = process.env;
assert.ok(address && metrics, "PELLUCID_SERVER and PELLUCID_METRICS name the server");

const client = new Client(address);
after(() => client.close());

const endless = { ignoreEos: true, maxNewTokens: 4000 };

/** Sum of the samples of this metric. */
async function metric(name: string): Promise<number> {
  const text = await (await fetch(`http://${metrics}/metrics`)).text();
  const samples = text.split("\n").filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `));
  assert.ok(samples.length > 0, `${name} is a metric`);
  return samples.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
}

/** Waits until the server has nothing to do, by its metrics and by its own account. */
async function idle(): Promise<void> {
  const end = Date.now() + 5000;
  while ((await metric("pellucid_requests_running")) + (await metric("pellucid_requests_waiting")) > 0) {
    assert.ok(Date.now() < end, "the server is idle within five seconds");
    await sleep(20);
  }
  const load = await client.load();
  assert.deepEqual([load.runningRequestCount, load.queuedRequestCount, load.draining], [0, 0, false]);
}

async function failure<Kind extends PellucidError>(promise: Promise<unknown>, kind: new (...rest: any[]) => Kind): Promise<Kind> {
  const error = await promise.then(() => assert.fail(`no ${kind.name} came`), (error: unknown) => error);
  assert.ok(error instanceof kind, `${error} is a ${kind.name}`);
  assert.equal(error.name, error.constructor.name);
  return error;
}

test("a stream is the sum of its chunks, Chinese text intact", async () => {
  const stream = client.generate("天地玄黄", { seed: 0, temperature: 0.9, maxNewTokens: 30, ignoreEos: true });
  const chunks: Chunk[] = [];
  for await (const chunk of stream) {
    if (chunks.length === 0) assert.equal(stream.prompt?.model, "tiny");
    chunks.push(chunk);
  }
  const answer = await stream.result();
  assert.equal(chunks.map((chunk) => chunk.text).join(""), answer.text);
  assert.deepEqual(chunks.flatMap((chunk) => chunk.tokenIds), answer.tokenIds);
  assert.equal(answer.tokenIds.length, 30);
  assert.deepEqual([answer.usage.outputTokenCount, answer.finish.outputTokenCount, answer.finish.reason], [30, 30, "max_new_tokens"]);
  assert.ok(chunks.slice(0, -1).every((chunk) => chunk.finish === undefined));
  assert.ok(answer.timings.totalMs! > 0 && answer.timings.timeToFirstTokenMs! <= answer.timings.totalMs!);
  assert.equal(answer.text, await client.detokenize(answer.tokenIds));
  assert.match(answer.text, /\p{Script=Han}/u);
  assert.ok(!answer.text.includes("\ufffd"));
});

test("tokens there and back", async () => {
  const text = "天地玄黄, hello!";
  const { tokenIds, tokens } = await client.tokenize(text, { omitSpecialTokens: true, returnTokens: true });
  assert.equal(Buffer.concat(tokens).toString(), text);
  assert.equal(await client.detokenize(tokenIds), text);
  assert.deepEqual(await client.detokenizeBatch([tokenIds, []]), [text, ""]);
  const byIds = await client.generate(tokenIds, { temperature: 0, maxNewTokens: 5 }).result();
  const byText = await client.generate(text, { temperature: 0, maxNewTokens: 5, omitSpecialTokens: true }).result();
  assert.deepEqual(byIds.tokenIds, byText.tokenIds);
});

test("values in force come back, and 0 is a value", async () => {
  const options = { temperature: 0, topK: 0, seed: 0, maxNewTokens: 1, stop: ["黄", "天"], returnPromptTokenIds: true, context: "reject" } as const;
  const { prompt } = await client.generate("天地", options).result();
  const off = { topK: 0, topP: 1, minP: 0, typicalP: 1, repetitionPenalty: 1, presencePenalty: 0, frequencyPenalty: 0 };
  assert.deepEqual(prompt.sampling, { temperature: 0, seed: 0n, sequenceCount: 1, logitBias: {}, allowedTokenIds: [], ...off });
  assert.deepEqual([prompt.stop, prompt.maxNewTokens, prompt.context.overflow], [["黄", "天"], 1, "reject"]);
  assert.deepEqual(prompt.tokenIds, (await client.tokenize("天地")).tokenIds);
  assert.equal((await client.generate("天", { maxNewTokens: 0 }).result()).usage.outputTokenCount, 0);
});

test("several outputs of one prompt, each chunk with its index", async () => {
  const stream = client.generate("天地", { n: 3, seed: 3, maxNewTokens: 8, ignoreEos: true, temperature: 2 });
  const texts = ["", "", ""];
  for await (const { index, text } of stream) texts[index] += text;
  const { outputs, usage, text } = await stream.result();
  assert.deepEqual(outputs.map((output) => output.text), texts);
  assert.deepEqual(outputs.map((output) => [output.tokenIds.length, output.finish?.reason]), Array(3).fill([8, "max_new_tokens"]));
  assert.deepEqual([new Set(texts).size, usage.outputTokenCount, text], [3, 24, texts[0]]);
});

test("a conversation for the model's chat template", async () => {
  const options = { maxNewTokens: 1, returnPromptTokenIds: true };
  const { prompt } = await client.generate([{ role: "user", content: "天地" }, { role: "x", content: "<eos>" }], options).result();
  const text = await client.detokenize(prompt.tokenIds, { keepSpecialTokens: true });
  assert.equal(text, "user 天地,x <unk>eos<unk>,");
  const eos = (await client.tokenize("<eos>", { omitSpecialTokens: true, parseSpecialTokens: true })).tokenIds;
  assert.equal(eos.length, 1);
  assert.ok(!prompt.tokenIds.includes(eos[0]!), "what a message spells is plain text");
  const error = await failure(client.generate([{ role: "no way", content: "" }]).result(), InvalidRequest);
  assert.deepEqual(error.violations.map(({ field }) => field), ["chat.messages[0].role"]);
});

test("bias, allowed ids, cache and priority", async () => {
  const options = { maxNewTokens: 6, ignoreEos: true, cacheSalt: "node", bypassCacheRead: true, bypassCacheWrite: true, priority: -5 };
  const only = await client.generate("天", { ...options, allowedTokenIds: [9] }).result();
  assert.deepEqual(only.tokenIds, Array(6).fill(9));
  const biased = await client.generate("天", { ...options, temperature: 0, logitBias: { 7: 100 } }).result();
  assert.deepEqual([biased.tokenIds, biased.prompt.sampling.logitBias], [Array(6).fill(7), { 7: 100 }]);
});

test("log-probabilities of output and prompt", async () => {
  const options = { temperature: 0, maxNewTokens: 3, ignoreEos: true, logprobs: { topCount: 2, tokenIds: [9] }, promptLogprobs: { start: 1 } };
  const { logprobs, tokenIds, prompt } = await client.generate("天地", options).result();
  assert.deepEqual(logprobs.map(({ tokenId, rank }) => [tokenId, rank]), tokenIds.map((id) => [id, 1]));
  assert.ok(logprobs.every(({ logprob, alternatives }) => logprob! <= 0 && alternatives.length === 3));
  assert.equal(Buffer.concat(prompt.logprobs.map(({ token }) => token)).toString(), "天地");
});

test("constraints", async () => {
  const options = { maxNewTokens: 20 };
  assert.match((await client.generate("天", { ...options, constraint: { regex: "[ab]{3}" } }).result()).text, /^[ab]{3}$/);
  const chosen = await client.generate("天", { ...options, constraint: { choices: ["天地", "日月"] } }).result();
  assert.ok(["天地", "日月"].includes(chosen.text));
  const error = await failure(client.generate("天", { constraint: { regex: "(" } }).result(), InvalidRequest);
  assert.deepEqual(error.violations.map(({ field }) => field), ["constraint.regex"]);
  const wrong: any = { regex: "a", choices: ["b"] };
  assert.throws(() => client.generate("天", { constraint: wrong }), TypeError);
});

test("every seed of 64 bits arrives", async () => {
  for (const seed of [0n, 2n ** 53n + 1n, 2n ** 63n, 2n ** 64n - 1n]) {
    assert.equal((await client.generate("天", { seed, maxNewTokens: 1 }).result()).prompt.sampling.seed, seed);
  }
  const texts = new Set<string>();
  for (let i = 0; i < 3; i++) texts.add((await client.generate("天", { seed: 7, maxNewTokens: 40, ignoreEos: true }).result()).text);
  assert.equal(texts.size, 1);
});

test("many streams at once", async () => {
  const ask = (seed: number) => client.generate("日月", { seed, maxNewTokens: 20 }).result();
  const crowded = await Promise.all(Array.from({ length: 16 }, (_, seed) => ask(seed)));
  for (const [seed, answer] of crowded.entries()) assert.deepEqual((await ask(seed)).tokenIds, answer.tokenIds);
});

test("what is served", async () => {
  const [model, ...others] = await client.models();
  assert.ok(model);
  assert.deepEqual([others, model], [[], await client.model("tiny")]);
  assert.deepEqual([model.maxContextTokens, model.defaultSampling.temperature], [4096, 1]);
  const info = await client.serverInfo();
  assert.match(info.version, /^\d+\.\d+/);
  assert.ok(info.kvBlockCount > 0 && info.uptimeMs > 0);
  assert.equal((await client.load()).kvBlockCount, info.kvBlockCount);
});

test("an abort signal ends the request in the server", async () => {
  const controller = new AbortController();
  const stream = client.generate("天", { ...endless, signal: controller.signal });
  const read = async () => {
    for await (const _ of stream) controller.abort(new Error("enough"));
  };
  const error = await failure(read(), Cancelled);
  assert.equal((error.cause as Error).message, "enough");
  assert.ok(stream.tokenIds.length < 4000);
  await idle();
});

test("a signal that is aborted already sends nothing", async () => {
  const before = await metric("pellucid_requests_total");
  const signal = AbortSignal.abort();
  await failure(client.generate("天", { signal }).result(), Cancelled);
  await failure(client.tokenize("天", { signal }), Cancelled);
  assert.equal(await metric("pellucid_requests_total"), before);
});

test("leaving the loop ends the request in the server", async () => {
  for await (const _ of client.generate("天", endless)) break;
  await idle();
  await assert.rejects(async () => {
    for await (const _ of client.generate("天", endless)) throw new Error("the reader's own");
  }, /the reader's own/);
  await idle();
});

test("cancel from the stream and from outside", async () => {
  const stream = client.generate("天", endless);
  const chunks = stream[Symbol.asyncIterator]();
  assert.equal((await chunks.next()).done, false);
  stream.cancel();
  await failure(stream.result(), Cancelled);
  await idle();

  const other = client.generate("天", { ...endless, requestId: "node" });
  const reading = other[Symbol.asyncIterator]();
  await reading.next();
  assert.equal(await client.cancel("node"), true);
  assert.equal((await other.result()).finish.reason, "cancelled");
  assert.equal(await client.cancel("node"), false);
  await idle();
});

test("a deadline and a soft limit", async () => {
  const began = Date.now();
  const error = await failure(client.generate("天", { ...endless, timeoutMs: 50 }).result(), DeadlineExceeded);
  assert.equal(error.code, 4);
  assert.ok(Date.now() - began < 3000);
  await idle();
  const answer = await client.generate("天", { ...endless, timeLimitMs: 20 }).result();
  assert.equal(answer.finish.reason, "time_limit");
});

test("a bad request names every field", async () => {
  const error = await failure(client.generate("天", { temperature: 200, topP: 0, maxNewTokens: 1 }).result(), InvalidRequest);
  assert.deepEqual(error.violations.map(({ field }) => field).sort(), ["sampling.temperature", "sampling.top_p"]);
  assert.equal(error.reason, "INVALID_FIELD");
  assert.match(error.violations[0]!.description, /200|0/);
});

test("the other refusals have their own kinds", async () => {
  await failure(client.generate("天", { model: "other" }).result(), ModelNotFound);
  const error = await failure(client.generate("天".repeat(5000), { context: "reject" }).result(), PromptTooLong);
  assert.match(error.message, /4096/);
  const stream = client.generate("天", { ...endless, requestId: "mine" });
  await stream[Symbol.asyncIterator]().next();
  await failure(client.generate("天", { requestId: "mine" }).result(), RequestIdInUse);
  stream.cancel();
  await failure(stream.result(), Cancelled);
  await idle();
});

test("what a message cannot hold is refused here, by field", () => {
  const wrong: any = { maxNewTokens: -1, topK: 1.5, seed: 2 ** 60, stop: ["ok", "\ud800"], stopTokenIds: [2 ** 32], temperature: "hot", context: "x" };
  assert.throws(() => client.generate("天", wrong), (error) => {
    assert.ok(error instanceof InvalidRequest);
    assert.deepEqual(error.violations.map(({ field }) => field), [
      "sampling.temperature", "sampling.top_k", "sampling.seed", "stopping.max_new_tokens", "stopping.stop_strings[1]",
      "stopping.stop_token_ids[0]", "context.overflow",
    ]);
    return true;
  });
  for (const [options, problem] of [[{ n: -1 }, /sequence_count: -1 is not .* \[1, 64\]/], [{ priority: 0.5 }, /0\.5 is not .* \[-100, 100\]/]] as const) {
    assert.throws(() => client.generate("天", options), problem);
  }
  assert.throws(() => client.generate("天", { temprature: 1 } as any), /no option "temprature"/);
  assert.throws(() => client.generate([1, -2]), /token_ids\.ids\[1\]/);
});

test("no server: the address's failure is a kind of its own", async () => {
  const nobody = new Client("127.0.0.1:1");
  const began = Date.now();
  const error = await failure(nobody.generate("天", { timeoutMs: 20_000 }).result(), ConnectionFailed);
  assert.equal(error.code, 14);
  assert.ok(Date.now() - began < 10_000);
  await failure(nobody.load(), ConnectionFailed);
  nobody.close();
});

test("several servers take turns, and one that does not answer is left out", async () => {
  const both = new Client([address, "127.0.0.1:1"]);
  for (let i = 0; i < 4; i++) assert.equal((await both.generate("天", { maxNewTokens: 2, ignoreEos: true }).result()).tokenIds.length, 2);
  both.close();
  assert.throws(() => new Client(address, { attempts: 0 }), RangeError);
});
