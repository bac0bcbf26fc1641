/**
 * Against a server that wants a client certificate and a token: PELLUCID_LOCKED is its address, PELLUCID_CA,
 * PELLUCID_CERTIFICATE and PELLUCID_KEY are PEM files, and PELLUCID_TOKEN is a token it knows.
 */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, ConnectionFailed, Unauthenticated } from "pellucid-client";

const { PELLUCID_LOCKED: address = "", PELLUCID_TOKEN: token = "" } = process.env;
const files = { caCertificate: process.env.PELLUCID_CA, certificate: process.env.PELLUCID_CERTIFICATE, key: process.env.PELLUCID_KEY };
assert.ok(address && token && files.caCertificate && files.certificate && files.key, "the server and what it wants are named");

test("a client with everything gets in", async () => {
  const client = new Client(address, { ...files, token });
  assert.equal((await client.generate("a", { maxNewTokens: 3 }).result()).tokenIds.length, 3);
  assert.ok((await client.serverInfo()).version);
  client.close();
});

test("a client without a certificate, a token or TLS does not", async () => {
  const without = new Client(address, files);
  await assert.rejects(without.load(), Unauthenticated);
  const other = new Client(address, { ...files, token: "not-this-one" });
  await assert.rejects(other.generate("a").result(), Unauthenticated);
  const plain = new Client(address, { attempts: 1 });
  const anonymous = new Client(address, { caCertificate: files.caCertificate, token, attempts: 1 });
  for (const client of [plain, anonymous]) await assert.rejects(client.load({ timeoutMs: 10_000 }), ConnectionFailed);
  for (const client of [without, other, plain, anonymous]) client.close();
});

test("what does not go together is refused at once", () => {
  assert.throws(() => new Client(address, { certificate: files.certificate! }), /needs both/);
  assert.throws(() => new Client(address, { caCertificate: "/no/such/file" }), /ENOENT/);
  assert.throws(() => new Client(address, { token: "two words" }), (error: Error) => !error.message.includes("two words"));
});
