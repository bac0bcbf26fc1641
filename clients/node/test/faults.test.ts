/**
 * Against servers in trouble: PELLUCID_LOADING is the address of one that still loads, PELLUCID_DYING of one that holds
 * its answers back, and PELLUCID_DYING_PID its process, which is killed here.
 */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { Client, ConnectionFailed, Unavailable } from "pellucid-client";

const { PELLUCID_LOADING: loading = "", PELLUCID_DYING: dying = "", PELLUCID_DYING_PID: pid = "" } = process.env;
assert.ok(loading && dying && pid, "PELLUCID_LOADING, PELLUCID_DYING and PELLUCID_DYING_PID name the servers");

test("a server that is still loading is asked again", async () => {
  const once = new Client(loading, { attempts: 1 });
  await assert.rejects(once.generate("a", { maxNewTokens: 3 }).result(), (error) => {
    assert.ok(error instanceof Unavailable);
    assert.deepEqual([error.reason, error.retryAfterMs], ["MODEL_LOADING", 1000]);
    return true;
  });
  once.close();
  const client = new Client(loading);
  assert.equal((await client.generate("a", { maxNewTokens: 3 }).result()).tokenIds.length, 3);
  client.close();
});

test("a killed server ends a stream that has not begun", async () => {
  const client = new Client(dying);
  const answer = client.generate("a", { maxNewTokens: 50, delivery: "final", timeoutMs: 20_000 }).result();
  const failed = assert.rejects(answer, ConnectionFailed);
  const end = Date.now() + 10_000;
  while ((await client.load()).runningRequestCount === 0) {
    assert.ok(Date.now() < end, "the request runs");
    await sleep(20);
  }
  process.kill(Number(pid), "SIGKILL");
  const began = Date.now();
  await failed;
  assert.ok(Date.now() - began < 10_000);
  client.close();
});
