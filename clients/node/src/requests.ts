/**
 * Request messages from JavaScript values.
 *
 * What is undefined is not sent, and an explicit 0 is sent as 0. Ranges are the server's to check; only what a message
 * cannot hold at all (a negative count, half a surrogate pair), and what would change silently on the way, is refused
 * here, in the same form as the server's own refusal: InvalidRequest with every field named.
 */

import { status as Code } from "@grpc/grpc-js";
import { InvalidRequest, type Violation } from "./errors.js";
import type { DetokenizeRequest } from "./generated/pellucid/v1/DetokenizeRequest.js";
import type { GenerateRequest } from "./generated/pellucid/v1/GenerateRequest.js";
import type { TokenizeRequest } from "./generated/pellucid/v1/TokenizeRequest.js";
import type { ContextOverflow } from "./results.js";

export interface CallOptions {
  /** Aborting it cancels the call, in the server too. */
  signal?: AbortSignal;
  /** For the whole call; then DeadlineExceeded. */
  timeoutMs?: number;
}

/** Undefined: the server's default, which `stream.prompt` then shows. */
export interface GenerateOptions extends CallOptions {
  /** Needed only where the server has several. */
  model?: string;
  /** Your own name for the request, unique among those in flight; `client.cancel` takes it. */
  requestId?: string;
  /** [0, 100]; 0 = greedy. */
  temperature?: number;
  /** Keep the k most likely tokens; 0 = off. */
  topK?: number;
  /** (0, 1]; 1 = off. */
  topP?: number;
  /** [0, 1); 0 = off. */
  minP?: number;
  /** [0, 2^64); the same request with the same seed gives the same tokens. */
  seed?: number | bigint;
  /** 0 = only run the prompt. */
  maxNewTokens?: number;
  /** No end before this many tokens. */
  minNewTokens?: number;
  /** Stop strings, matched on the output's text. */
  stop?: string | readonly string[];
  stopTokenIds?: readonly number[];
  includeStopInText?: boolean;
  /** Go on past the model's end tokens. */
  ignoreEos?: boolean;
  /** From admission; the stream then ends well, with finish "time_limit". */
  timeLimitMs?: number;
  /** What happens when prompt and output pass the trained context. */
  context?: ContextOverflow;
  /** "roll" and "reencode": newest tokens that stay visible. */
  windowTokens?: number;
  /** "roll" and "reencode": first tokens that stay visible for ever. */
  sinkTokens?: number;
  /** "reencode": tokens dropped at a time. */
  hopTokens?: number;
  /** Text prompts: do not add BOS and the like. */
  omitSpecialTokens?: boolean;
  /** Text prompts: spellings of special tokens become those tokens. */
  parseSpecialTokens?: boolean;
  /** Leave special tokens in the text. */
  keepSpecialTokens?: boolean;
  omitText?: boolean;
  omitTokenIds?: boolean;
  returnPromptTokenIds?: boolean;
  /** "final": one message at the end. */
  delivery?: "incremental" | "final";
  /** [1, 256]; tokens to gather before a message is sent. */
  minTokensPerMessage?: number;
}

export interface TokenizeOptions extends CallOptions {
  model?: string;
  /** Do not add BOS and the like. */
  omitSpecialTokens?: boolean;
  /** Spellings of special tokens in the text become those tokens. */
  parseSpecialTokens?: boolean;
  /** Also the bytes that each token stands for. */
  returnTokens?: boolean;
}

export interface DetokenizeOptions extends CallOptions {
  model?: string;
  /** Leave special tokens in the text. */
  keepSpecialTokens?: boolean;
}

export function generateRequest(prompt: string | readonly number[], options: GenerateOptions): GenerateRequest {
  const {
    signal, timeoutMs, model, requestId, temperature, topK, topP, minP, seed, maxNewTokens, minNewTokens, stop, stopTokenIds,
    includeStopInText, ignoreEos, timeLimitMs, context, windowTokens, sinkTokens, hopTokens, omitSpecialTokens,
    parseSpecialTokens, keepSpecialTokens, omitText, omitTokenIds, returnPromptTokenIds, delivery, minTokensPerMessage,
    ...unknown
  } = options;
  refuseUnknown("generate", unknown);
  const check = new Checks();
  const isText = typeof prompt === "string";
  const request: GenerateRequest = {
    requestId: check.text("request_id", requestId),
    model: check.text("model", model),
    text: isText ? check.text("text", prompt) : undefined,
    tokenIds: isText ? undefined : { ids: check.list("token_ids.ids", prompt, check.count) },
    omitSpecialTokens,
    parseSpecialTokens,
    sampling: {
      temperature: check.number("sampling.temperature", temperature),
      topK: check.count("sampling.top_k", topK),
      topP: check.number("sampling.top_p", topP),
      minP: check.number("sampling.min_p", minP),
      seed: check.seed("sampling.seed", seed),
    },
    stopping: {
      maxNewTokens: check.count("stopping.max_new_tokens", maxNewTokens),
      minNewTokens: check.count("stopping.min_new_tokens", minNewTokens),
      stopStrings: check.list("stopping.stop_strings", typeof stop === "string" ? [stop] : stop, check.text),
      stopTokenIds: check.list("stopping.stop_token_ids", stopTokenIds, check.count),
      includeStopInText,
      ignoreEos,
      timeLimit: check.duration("stopping.time_limit", timeLimitMs),
    },
    context: {
      overflow: check.name("context.overflow", context, overflows),
      windowTokens: check.count("context.window_tokens", windowTokens),
      sinkTokens: check.count("context.sink_tokens", sinkTokens),
      hopTokens: check.count("context.hop_tokens", hopTokens),
    },
    output: {
      omitText,
      omitTokenIds,
      keepSpecialTokens,
      returnPromptTokenIds,
      deliveryMode: check.name("output.delivery_mode", delivery, deliveries),
      minTokensPerMessage: check.count("output.min_tokens_per_message", minTokensPerMessage),
    },
  };
  check.finish();
  return request;
}

export function tokenizeRequest(texts: readonly string[], options: TokenizeOptions): TokenizeRequest {
  const { signal, timeoutMs, model, omitSpecialTokens, parseSpecialTokens, returnTokens, ...unknown } = options;
  refuseUnknown("tokenize", unknown);
  const check = new Checks();
  const request = {
    model: check.text("model", model),
    texts: check.list("texts", texts, check.text),
    omitSpecialTokens,
    parseSpecialTokens,
    returnTokens,
  };
  check.finish();
  return request;
}

export function detokenizeRequest(sequences: readonly (readonly number[])[], options: DetokenizeOptions): DetokenizeRequest {
  const { signal, timeoutMs, model, keepSpecialTokens, ...unknown } = options;
  refuseUnknown("detokenize", unknown);
  const check = new Checks();
  const request = {
    model: check.text("model", model),
    sequences: sequences.map((ids, i) => ({ ids: check.list(`sequences[${i}].ids`, ids, check.count) })),
    keepSpecialTokens,
  };
  check.finish();
  return request;
}

function refuseUnknown(method: string, unknown: object): void {
  const names = Object.keys(unknown);
  if (names.length > 0) throw new TypeError(`${method}() has no option ${JSON.stringify(names[0])}`);
}

const overflows = {
  auto: "CONTEXT_OVERFLOW_AUTO",
  reject: "CONTEXT_OVERFLOW_REJECT",
  truncate: "CONTEXT_OVERFLOW_TRUNCATE",
  roll: "CONTEXT_OVERFLOW_ROLL",
  reencode: "CONTEXT_OVERFLOW_REENCODE",
} as const;
const deliveries = { incremental: "DELIVERY_MODE_INCREMENTAL", final: "DELIVERY_MODE_FINAL" } as const;

const MAX_UINT32 = 2 ** 32 - 1;
const MAX_UINT64 = 2n ** 64n - 1n;

/** Collects what is wrong; each check gives the value for the field, and undefined stays undefined. */
class Checks {
  private readonly violations: Violation[] = [];

  finish(): void {
    if (this.violations.length === 0) return;
    const message = this.violations.map(({ field, description }) => `${field}: ${description}`).join("; ");
    throw new InvalidRequest(message, { code: Code.INVALID_ARGUMENT, reason: "INVALID_FIELD", violations: this.violations });
  }

  readonly text = (field: string, value: string | undefined): string | undefined =>
    this.require(field, value, typeof value === "string" && value.isWellFormed(), "is not Unicode text");

  readonly number = (field: string, value: number | undefined): number | undefined =>
    this.require(field, value, typeof value === "number", "is not a number");

  readonly count = (field: string, value: number | undefined): number | undefined =>
    this.require(field, value, Number.isInteger(value) && value! >= 0 && value! <= MAX_UINT32, `is not an integer in [0, ${MAX_UINT32}]`);

  seed(field: string, value: number | bigint | undefined): string | undefined {
    const whole = typeof value === "bigint" || Number.isSafeInteger(value);
    const fits = whole && value! >= 0 && value! <= MAX_UINT64;
    return this.require(field, value, fits, `is not an integer in [0, ${MAX_UINT64}] (above 2^53 as a bigint)`)?.toString();
  }

  duration(field: string, milliseconds: number | undefined): { seconds: number; nanos: number } | undefined {
    const checked = this.require(field, milliseconds, Number.isFinite(milliseconds), "is not a number of milliseconds");
    if (checked === undefined) return undefined;
    const seconds = Math.trunc(checked / 1000);
    return { seconds, nanos: Math.round((checked - seconds * 1000) * 1e6) };
  }

  name<Names extends Record<string, unknown>>(field: string, value: keyof Names | undefined, names: Names): Names[keyof Names] | undefined {
    const known = this.require(field, value, value !== undefined && Object.hasOwn(names, value), `is not one of ${Object.keys(names).join(", ")}`);
    return known === undefined ? undefined : names[known];
  }

  list<T>(field: string, values: readonly T[] | undefined, check: (field: string, value: T) => T | undefined): T[] | undefined {
    if (values === undefined) return undefined;
    return Array.from(values, (value, i) => check(`${field}[${i}]`, value) ?? value);
  }

  private require<T>(field: string, value: T | undefined, fits: boolean, problem: string): T | undefined {
    if (value === undefined || fits) return value;
    this.violations.push({ field, description: `${typeof value === "string" ? JSON.stringify(value) : String(value)} ${problem}` });
    return undefined;
  }
}
