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
import type { DecodingConstraint } from "./generated/pellucid/v1/DecodingConstraint.js";
import type { GenerateRequest } from "./generated/pellucid/v1/GenerateRequest.js";
import type { LogprobOptions as LogprobFields } from "./generated/pellucid/v1/LogprobOptions.js";
import type { TokenizeRequest } from "./generated/pellucid/v1/TokenizeRequest.js";
import type { ContextOverflow } from "./results.js";

export interface CallOptions {
  /** Aborting it cancels the call, in the server too. */
  signal?: AbortSignal;
  /** For the whole call; then DeadlineExceeded. */
  timeoutMs?: number;
}

export interface ChatMessage {
  /** Such as "system", "user" and "assistant". */
  role: string;
  content: string;
}

/** What to continue: a text, token ids, or a conversation for the model's chat template. */
export type Prompt = string | readonly number[] | readonly ChatMessage[];

/** Undefined: the server's default, which `stream.prompt` then shows. */
export interface GenerateOptions extends CallOptions {
  /** Needed only where the server has several. */
  model?: string;
  /** Your own name for the request, unique among those in flight; `client.cancel` takes it. */
  requestId?: string;
  /** [-100, 100]; higher runs sooner. */
  priority?: number;
  /** Conversations: end the prompt after the last message, instead of opening the assistant's turn. */
  omitGenerationPrompt?: boolean;
  /** [0, 100]; 0 = greedy. */
  temperature?: number;
  /** Keep the k most likely tokens; 0 = off. */
  topK?: number;
  /** (0, 1]; 1 = off. */
  topP?: number;
  /** [0, 1); 0 = off. */
  minP?: number;
  /** (0, 1]; 1 = off. */
  typicalP?: number;
  /** [0.01, 100], on tokens of prompt and output; 1 = off. */
  repetitionPenalty?: number;
  /** [-2, 2], on tokens of the output; 0 = off. */
  presencePenalty?: number;
  /** [-2, 2], on tokens of the output for each time they occur; 0 = off. */
  frequencyPenalty?: number;
  /** Token id to what is added to its logit, in [-100, 100]. */
  logitBias?: Readonly<Record<number, number>>;
  /** The only ids that may be chosen. */
  allowedTokenIds?: readonly number[];
  /** [1, 64]; so many outputs of the one prompt, each chunk with its `index`. */
  n?: number;
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
  /** What the output must match as a whole. */
  constraint?: Constraint;
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
  /** Log-probabilities of the output's tokens, in each chunk. */
  logprobs?: LogprobOptions;
  /** The same for the prompt's tokens, in `stream.prompt`, from the position `start` on. */
  promptLogprobs?: LogprobOptions & { start?: number };
  /** Compute the whole prompt, whatever is cached. */
  bypassCacheRead?: boolean;
  /** Keep nothing of this prompt for later ones. */
  bypassCacheWrite?: boolean;
  /** Share computed prompts with requests of the same salt only. */
  cacheSalt?: string;
  /** "final": one message at the end. */
  delivery?: "incremental" | "final";
  /**
   * [1, 256]; tokens to gather before a message is sent. Left out: 1, but tokens that come within about 16 to 50 ms after a
   * message, the longer the more streams there are, gather for the next one; an explicit 1 sends each as soon as it is
   * there.
   */
  minTokensPerMessage?: number;
}

/** Exactly one way; a schema may be given as an object. */
export type Constraint =
  | { jsonSchema: string | object }
  | { jsonObject: true }
  | { regex: string }
  | { ebnfGrammar: string }
  | { choices: readonly string[] };

export interface LogprobOptions {
  /** So many of the likeliest tokens beside each; 0: the token alone. */
  topCount?: number;
  /** And these tokens, wherever they rank. */
  tokenIds?: readonly number[];
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

export function generateRequest(prompt: Prompt, options: GenerateOptions): GenerateRequest {
  const {
    signal, timeoutMs, model, requestId, priority, omitGenerationPrompt, temperature, topK, topP, minP, typicalP, repetitionPenalty,
    presencePenalty, frequencyPenalty, logitBias, allowedTokenIds, n, constraint, logprobs, promptLogprobs, bypassCacheRead,
    bypassCacheWrite, cacheSalt, seed, maxNewTokens, minNewTokens, stop, stopTokenIds,
    includeStopInText, ignoreEos, timeLimitMs, context, windowTokens, sinkTokens, hopTokens, omitSpecialTokens,
    parseSpecialTokens, keepSpecialTokens, omitText, omitTokenIds, returnPromptTokenIds, delivery, minTokensPerMessage,
    ...unknown
  } = options;
  refuseUnknown("generate", unknown);
  const check = new Checks();
  const request: GenerateRequest = {
    requestId: check.text("request_id", requestId),
    model: check.text("model", model),
    ...promptFields(check, prompt, omitGenerationPrompt),
    priority: check.integerIn("priority", priority, -100, 100),
    omitSpecialTokens,
    parseSpecialTokens,
    sampling: {
      temperature: check.number("sampling.temperature", temperature),
      topK: check.countIn("sampling.top_k", topK, 0, 2 ** 31 - 1),
      topP: check.number("sampling.top_p", topP),
      minP: check.number("sampling.min_p", minP),
      typicalP: check.number("sampling.typical_p", typicalP),
      repetitionPenalty: check.number("sampling.repetition_penalty", repetitionPenalty),
      presencePenalty: check.number("sampling.presence_penalty", presencePenalty),
      frequencyPenalty: check.number("sampling.frequency_penalty", frequencyPenalty),
      logitBias: check.biases("sampling.logit_bias", logitBias),
      allowedTokenIds: check.list("sampling.allowed_token_ids", allowedTokenIds, check.count),
      sequenceCount: check.countIn("sampling.sequence_count", n, 1, 64),
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
    constraint: constraint && constraintFields(check, constraint),
    cache: { bypassRead: bypassCacheRead, bypassWrite: bypassCacheWrite, salt: check.text("cache.salt", cacheSalt) },
    output: {
      outputLogprobs: logprobs && logprobFields(check, "output.output_logprobs", logprobs),
      promptLogprobs: promptLogprobs && logprobFields(check, "output.prompt_logprobs", promptLogprobs),
      omitText,
      omitTokenIds,
      keepSpecialTokens,
      returnPromptTokenIds,
      deliveryMode: check.name("output.delivery_mode", delivery, deliveries),
      minTokensPerMessage: check.countIn("output.min_tokens_per_message", minTokensPerMessage, 1, 256),
    },
  };
  check.finish();
  return request;
}

function promptFields(check: Checks, prompt: Prompt, omitGenerationPrompt: boolean | undefined): GenerateRequest {
  if (typeof prompt === "string") return { text: check.text("text", prompt) };
  if (isConversation(prompt)) {
    const messages = prompt.map(({ role, content }, i) => ({
      role: check.text(`chat.messages[${i}].role`, role),
      content: check.text(`chat.messages[${i}].content`, content),
    }));
    return { chat: { messages, omitGenerationPrompt } };
  }
  return { tokenIds: { ids: check.list("token_ids.ids", prompt, check.count) } };
}

function isConversation(prompt: readonly number[] | readonly ChatMessage[]): prompt is readonly ChatMessage[] {
  return typeof prompt[0] === "object";
}

function constraintFields(check: Checks, constraint: Constraint): DecodingConstraint {
  const ways = Object.keys(constraint);
  if (ways.length !== 1) throw new TypeError(`constraint: one way is required, not ${JSON.stringify(ways)}`);
  if ("jsonSchema" in constraint) {
    const { jsonSchema: schema } = constraint;
    return { jsonSchema: check.text("constraint.json_schema", typeof schema === "object" ? JSON.stringify(schema) : schema) };
  }
  if ("jsonObject" in constraint) return { jsonObject: {} };
  if ("regex" in constraint) return { regex: check.text("constraint.regex", constraint.regex) };
  if ("ebnfGrammar" in constraint) return { ebnfGrammar: check.text("constraint.ebnf_grammar", constraint.ebnfGrammar) };
  if ("choices" in constraint) return { choices: { values: check.list("constraint.choices.values", constraint.choices, check.text) } };
  throw new TypeError(`constraint: ${JSON.stringify(ways[0])} is no way to constrain an output`);
}

function logprobFields(check: Checks, field: string, { topCount, tokenIds, start }: LogprobOptions & { start?: number }): LogprobFields {
  return {
    topCount: check.count(`${field}.top_count`, topCount),
    tokenIds: check.list(`${field}.token_ids`, tokenIds, check.count),
    startPosition: check.count(`${field}.start_position`, start),
  };
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

  readonly count = (field: string, value: number | undefined): number | undefined => this.countIn(field, value, 0, MAX_UINT32);

  /** `least` and `most` are the server's to check; they are told of what a message cannot hold. */
  countIn(field: string, value: number | undefined, least: number, most: number): number | undefined {
    return this.require(field, value, Number.isInteger(value) && value! >= 0 && value! <= MAX_UINT32, `is not an integer in [${least}, ${most}]`);
  }

  /** As `countIn`, with a sign. */
  integerIn(field: string, value: number | undefined, least: number, most: number): number | undefined {
    return this.require(field, value, Number.isInteger(value) && Math.abs(value!) < 2 ** 31, `is not an integer in [${least}, ${most}]`);
  }

  biases(field: string, values: Readonly<Record<number, number>> | undefined): Record<number, number> | undefined {
    for (const [id, bias] of Object.entries(values ?? {})) {
      this.count(`${field}[${id}]`, Number(id));
      this.number(`${field}[${id}]`, bias);
    }
    return values;
  }

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
