/** An answer as it is made. */

import type { ClientReadableStream } from "@grpc/grpc-js";
import { status as Code } from "@grpc/grpc-js";
import { Cancelled, InternalError, toPellucidError } from "./errors.js";
import type { GenerateResponse__Output } from "./generated/pellucid/v1/GenerateResponse.js";
import * as results from "./results.js";
import type { Chunk, Completion, Finish, Output, PromptInfo, Timings, Usage } from "./results.js";

/**
 * Iterate over the chunks with `for await`, or take the whole with `await stream.result()`.
 *
 * The request is sent when reading begins. Leaving the loop early, by `break` or by an error, cancels it.
 */
export class GenerateStream implements AsyncIterable<Chunk> {
  /** What the server made of the request; undefined before the first chunk. */
  prompt?: PromptInfo;
  /** Every sequence so far. */
  readonly outputs: Output[] = [{ text: "", tokenIds: [], logprobs: [] }];
  usage?: Usage;
  timings?: Timings;

  readonly #abort = new AbortController();
  readonly #chunks: AsyncGenerator<Chunk, void, undefined>;

  /** `start` sends the request; `signal` is the caller's. */
  constructor(start: () => ClientReadableStream<GenerateResponse__Output>, signal?: AbortSignal) {
    this.#chunks = this.#read(start, signal ? AbortSignal.any([signal, this.#abort.signal]) : this.#abort.signal);
  }

  /** The text of the first sequence so far. */
  get text(): string {
    return this.#first.text;
  }

  /** The token ids of the first sequence so far. */
  get tokenIds(): readonly number[] {
    return this.#first.tokenIds;
  }

  /** Why the first sequence ended; undefined before its last chunk. */
  get finish(): Finish | undefined {
    return this.#first.finish;
  }

  get #first(): Output {
    return this.outputs[0]!;
  }

  [Symbol.asyncIterator](): AsyncGenerator<Chunk, void, undefined> {
    return this.#chunks;
  }

  /** Ends the request in the server. Reading on throws Cancelled; after the end it does nothing. */
  cancel(reason?: unknown): void {
    this.#abort.abort(reason);
  }

  /** Reads to the end and gives the whole answer, chunks already read included. */
  async result(): Promise<Completion> {
    for await (const _ of this) {
      // The running sum is kept by the stream.
    }
    const { outputs, prompt, usage, timings } = this;
    const { text, tokenIds, logprobs, finish } = this.#first;
    if (!finish || !prompt || !usage || !timings) {
      throw new InternalError("the stream ended without prompt, finish, usage or timings; is this a Pellucid server?", { code: Code.UNKNOWN });
    }
    return { text, tokenIds, finish, logprobs, outputs, prompt, usage, timings };
  }

  async *#read(start: () => ClientReadableStream<GenerateResponse__Output>, signal: AbortSignal): AsyncGenerator<Chunk, void, undefined> {
    if (signal.aborted) throw cancelled(signal);
    const call = start();
    const cancel = () => call.cancel();
    signal.addEventListener("abort", cancel, { once: true });
    try {
      for await (const message of call as AsyncIterable<GenerateResponse__Output>) {
        // Messages that came before the abort may still be in the buffer.
        if (signal.aborted) throw cancelled(signal);
        yield* this.#take(message);
      }
    } catch (error) {
      throw toPellucidError(error, signal);
    } finally {
      signal.removeEventListener("abort", cancel);
      call.cancel();
    }
  }

  #take(message: GenerateResponse__Output): Chunk[] {
    if (message.prompt) this.prompt = results.promptInfo(message.prompt);
    if (message.usage) this.usage = message.usage;
    if (message.timings) this.timings = results.timings(message.timings);
    const chunks = message.outputs.map(results.chunk);
    for (const { index, text, tokenIds, logprobs, finish } of chunks) {
      const output = (this.outputs[index] ??= { text: "", tokenIds: [], logprobs: [] });
      output.text += text;
      output.tokenIds.push(...tokenIds);
      output.logprobs.push(...logprobs);
      output.finish ??= finish;
    }
    return chunks;
  }
}

export function cancelled(signal: AbortSignal): Cancelled {
  return new Cancelled("the call was cancelled", { code: Code.CANCELLED, cause: signal.reason });
}
