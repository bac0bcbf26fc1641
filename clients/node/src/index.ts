/**
 * Client of a Pellucid inference server.
 *
 * @example
 * import { Client } from "pellucid-client";
 * const client = new Client("127.0.0.1:50051");
 * const answer = await client.generate("今天天气", { temperature: 0 }).result();
 */

export { Client, type ClientOptions } from "./client.js";
export * from "./errors.js";
export type { CallOptions, ChatMessage, Constraint, DetokenizeOptions, GenerateOptions, LogprobOptions, Prompt, TokenizeOptions } from "./requests.js";
export type {
  Chunk, Completion, ContextOverflow, Finish, FinishReason, Load, Model, Output, PromptInfo, Sampling, ServerInfo, Timings, TokenAlternative,
  Tokenization, TokenLogprob, Usage,
} from "./results.js";
export { GenerateStream } from "./stream.js";
