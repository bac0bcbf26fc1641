/** What the client hands back: plain objects under the contract's own names, durations as milliseconds. */

import type { Duration__Output } from "./generated/google/protobuf/Duration.js";
import type { Finish__Output } from "./generated/pellucid/v1/Finish.js";
import type { GetLoadResponse__Output } from "./generated/pellucid/v1/GetLoadResponse.js";
import type { GetServerInfoResponse__Output } from "./generated/pellucid/v1/GetServerInfoResponse.js";
import type { Model__Output } from "./generated/pellucid/v1/Model.js";
import type { OutputDelta__Output } from "./generated/pellucid/v1/OutputDelta.js";
import type { PromptInfo__Output } from "./generated/pellucid/v1/PromptInfo.js";
import type { SamplingParams__Output } from "./generated/pellucid/v1/SamplingParams.js";
import type { Timings__Output } from "./generated/pellucid/v1/Timings.js";
import type { Tokenization__Output } from "./generated/pellucid/v1/Tokenization.js";
import type { TokenLogprob__Output } from "./generated/pellucid/v1/TokenLogprob.js";

/** A value that only a newer server knows is its number as text. */
type Open<Names extends string> = Names | (string & {});

export type FinishReason = Open<"eos" | "stop_token" | "stop_string" | "max_new_tokens" | "context_full" | "time_limit" | "constraint_done" | "no_token" | "cancelled">;
export type ContextOverflow = "auto" | "reject" | "truncate" | "roll" | "reencode";

/** Sampling values in force; undefined where the server did not say. */
export interface Sampling {
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  typicalP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  seed?: bigint;
  sequenceCount?: number;
  logitBias: Record<number, number>;
  /** Empty: all. */
  allowedTokenIds: number[];
}

/** A token that could have stood in another one's place. */
export interface TokenAlternative {
  tokenId: number;
  /** Natural logarithm, of the model's own distribution. */
  logprob: number;
  /** 1 = the likeliest. */
  rank: number;
  /** What it adds to the text; need not be whole characters. */
  token: Uint8Array;
}

/** A token's place in the model's own distribution, before bias, penalties, temperature and filters. */
export interface TokenLogprob extends Omit<TokenAlternative, "logprob"> {
  /** Undefined for the first prompt token, which nothing precedes; its rank is 0. */
  logprob?: number;
  /** The likeliest tokens in their order, then those asked for by id. */
  alternatives: TokenAlternative[];
}

/** What the server made of the request. Comes with the first chunk. */
export interface PromptInfo {
  requestId: string;
  model: string;
  /** Tokens of the prompt as it was sent, BOS included. */
  promptTokenCount: number;
  /** Those of them that were found in the server's cache. */
  cachedTokenCount: number;
  /** Prompt tokens that the model does not see, by the context policy. */
  droppedTokenCount: number;
  /** The prompt's tokens. Empty unless `returnPromptTokenIds`. */
  tokenIds: number[];
  /** One per prompt token from `start` on. Empty unless `promptLogprobs`. */
  logprobs: TokenLogprob[];
  sampling: Sampling;
  /** Tokens this request may make at the most, after the room that the context leaves. */
  maxNewTokens: number;
  stop: string[];
  /** The model's end tokens included, unless `ignoreEos`. */
  stopTokenIds: number[];
  context: { overflow: Open<ContextOverflow>; windowTokens?: number; sinkTokens?: number; hopTokens?: number };
}

/** Why the sequence ended. */
export interface Finish {
  reason: FinishReason;
  /** The end or stop token's id, or the stop string. */
  matched?: number | string;
  /** End and stop tokens included. */
  outputTokenCount: number;
}

/** New output of one sequence. It may have ids and no text, or text and no ids: do not pair them up. */
export interface Chunk {
  /** Which sequence, from 0 to n - 1. */
  index: number;
  /** Whole characters, to be appended to what came before. */
  text: string;
  /** Exactly the sampled ids. */
  tokenIds: number[];
  /** One per sampled id. Empty unless `logprobs`. */
  logprobs: TokenLogprob[];
  /** Set in the last chunk of the sequence. */
  finish?: Finish;
}

/** One sequence: the sum of its chunks. */
export type Output = Omit<Chunk, "index">;

export interface Usage {
  promptTokenCount: number;
  /** Those of them that were found in the server's cache. */
  cachedTokenCount: number;
  /** Of all sequences. */
  outputTokenCount: number;
}

/** Where the time went, measured in the server from admission. Undefined: there was no such moment. */
export interface Timings {
  queueMs?: number;
  prefillMs?: number;
  timeToFirstTokenMs?: number;
  decodeMs?: number;
  totalMs?: number;
  preemptionCount: number;
  engineRecoveryCount: number;
  /** Times the context window moved while the output was made. */
  windowMoveCount: number;
}

/** A whole answer: the sum of a stream's chunks. What is there by itself is the first sequence's; `outputs` has them all. */
export interface Completion {
  text: string;
  tokenIds: number[];
  finish: Finish;
  logprobs: TokenLogprob[];
  outputs: Output[];
  prompt: PromptInfo;
  usage: Usage;
  timings: Timings;
}

export interface Tokenization {
  tokenIds: number[];
  /** The bytes that each token stands for; they need not be whole characters. Empty unless `returnTokens`. */
  tokens: Uint8Array[];
}

export interface Model {
  name: string;
  /** Trained context: prompt and output together. */
  maxContextTokens: number;
  maxOutputTokens: number;
  vocabSize: number;
  eosTokenIds: number[];
  defaultSampling: Sampling;
  /** Empty: the model takes token ids only. */
  tokenizerSha256: string;
  /** What requests may ask for, such as "chat", "regex" and "prefix_cache". */
  features: string[];
  /** Largest `topCount`. */
  maxTopLogprobs: number;
}

export interface ServerInfo {
  version: string;
  schemaRevision: number;
  instanceId: string;
  uptimeMs: number;
  maxRunningRequests: number;
  maxQueuedRequests: number;
  maxBatchedTokens: number;
  kvBlockSize: number;
  kvBlockCount: number;
  device: string;
  dtype: string;
  kernels: string;
  batchInvariant: boolean;
}

export interface Load {
  runningRequestCount: number;
  queuedRequestCount: number;
  usedKvBlockCount: number;
  kvBlockCount: number;
  runningTokenCount: number;
  queuedTokenCount: number;
  draining: boolean;
}

export function toMilliseconds(duration: Duration__Output | null | undefined): number | undefined {
  return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : undefined;
}

/** FINISH_REASON_EOS -> "eos". */
function enumValue(value: string | number, prefix: string): string {
  const name = String(value);
  return name.startsWith(prefix) ? name.slice(prefix.length).toLowerCase() : name;
}

function sampling(message: SamplingParams__Output | null): Sampling {
  const { temperature, topK, topP, minP, typicalP, repetitionPenalty, presencePenalty, frequencyPenalty, seed, sequenceCount } = message ?? {};
  return {
    temperature, topK, topP, minP, typicalP, repetitionPenalty, presencePenalty, frequencyPenalty, sequenceCount,
    seed: seed === undefined ? undefined : BigInt(seed),
    logitBias: message?.logitBias ?? {},
    allowedTokenIds: message?.allowedTokenIds ?? [],
  };
}

function logprobs(messages: TokenLogprob__Output[]): TokenLogprob[] {
  return messages.map(({ tokenId, logprob, rank, token, alternatives }) => ({ tokenId, logprob, rank, token, alternatives }));
}

export function promptInfo(message: PromptInfo__Output): PromptInfo {
  const { overflow = 0, windowTokens, sinkTokens, hopTokens } = message.effectiveContext ?? {};
  return {
    requestId: message.requestId,
    model: message.model,
    promptTokenCount: message.promptTokenCount,
    cachedTokenCount: message.cachedTokenCount,
    droppedTokenCount: message.droppedTokenCount,
    tokenIds: message.tokenIds,
    logprobs: logprobs(message.logprobs),
    sampling: sampling(message.effectiveSampling),
    maxNewTokens: message.effectiveMaxNewTokens,
    stop: message.effectiveStopping?.stopStrings ?? [],
    stopTokenIds: message.effectiveStopping?.stopTokenIds ?? [],
    context: { overflow: enumValue(overflow, "CONTEXT_OVERFLOW_"), windowTokens, sinkTokens, hopTokens },
  };
}

function finish(message: Finish__Output): Finish {
  return {
    reason: enumValue(message.reason, "FINISH_REASON_"),
    matched: message.matched && message[message.matched],
    outputTokenCount: message.outputTokenCount,
  };
}

export function chunk(message: OutputDelta__Output): Chunk {
  return {
    index: message.sequenceIndex,
    text: message.text,
    tokenIds: message.tokenIds,
    logprobs: logprobs(message.logprobs),
    finish: message.finish ? finish(message.finish) : undefined,
  };
}

export function timings(message: Timings__Output): Timings {
  return {
    queueMs: toMilliseconds(message.queueTime),
    prefillMs: toMilliseconds(message.prefillTime),
    timeToFirstTokenMs: toMilliseconds(message.timeToFirstToken),
    decodeMs: toMilliseconds(message.decodeTime),
    totalMs: toMilliseconds(message.totalTime),
    preemptionCount: message.preemptionCount,
    engineRecoveryCount: message.engineRecoveryCount,
    windowMoveCount: message.windowMoveCount,
  };
}

export function tokenization(message: Tokenization__Output): Tokenization {
  return { tokenIds: message.tokenIds, tokens: message.tokens };
}

export function model(message: Model__Output): Model {
  return {
    ...message,
    defaultSampling: sampling(message.defaultSampling),
    features: message.features.map((feature) => enumValue(feature, "FEATURE_")),
  };
}

export function serverInfo(message: GetServerInfoResponse__Output): ServerInfo {
  const { uptime, kvBlockCount, ...rest } = message;
  return { ...rest, uptimeMs: toMilliseconds(uptime) ?? 0, kvBlockCount: Number(kvBlockCount) };
}

export function load(message: GetLoadResponse__Output): Load {
  const { usedKvBlockCount, kvBlockCount, runningTokenCount, queuedTokenCount, ...rest } = message;
  return {
    ...rest,
    usedKvBlockCount: Number(usedKvBlockCount),
    kvBlockCount: Number(kvBlockCount),
    runningTokenCount: Number(runningTokenCount),
    queuedTokenCount: Number(queuedTokenCount),
  };
}
