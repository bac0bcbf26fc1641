/** The client: one connection to a server, or to several that serve the same. */

import * as grpc from "@grpc/grpc-js";
import type { Deserialize, Serialize } from "@grpc/proto-loader";
import { methods } from "./contract.js";
import { InternalError, toPellucidError } from "./errors.js";
import {
  type CallOptions, type DetokenizeOptions, detokenizeRequest, type GenerateOptions, generateRequest, type Prompt, type TokenizeOptions,
  tokenizeRequest,
} from "./requests.js";
import * as results from "./results.js";
import type { Load, Model, ServerInfo, Tokenization } from "./results.js";
import { channelCredentials, type SecurityOptions, tokenMetadata } from "./security.js";
import { cancelled, GenerateStream } from "./stream.js";

const MAX_MESSAGE_BYTES = 16 * 2 ** 20;

export interface ClientOptions extends SecurityOptions {
  /** Sent with every call, such as `{ traceparent: "…" }`. */
  metadata?: Record<string, string>;
  /** How often a call is tried while the server is UNAVAILABLE and nothing of the answer has come: 1 to 5. */
  attempts?: number;
}

/**
 * @example
 * const client = new Client("127.0.0.1:50051");
 * for await (const chunk of client.generate("今天天气", { temperature: 0.7, seed: 1 })) process.stdout.write(chunk.text);
 * client.close();
 */
export class Client {
  readonly #client: grpc.Client;
  readonly #metadata = new grpc.Metadata();

  /** `address` is HOST:PORT, any gRPC target, or several IP:PORT, to which calls then go in turn. */
  constructor(address: string | readonly string[] = "127.0.0.1:50051", options: ClientOptions = {}) {
    const { metadata = {}, attempts = 3 } = options;
    for (const [key, value] of Object.entries({ ...metadata, ...tokenMetadata(options.token) })) this.#metadata.set(key, value);
    if (!(Number.isInteger(attempts) && attempts >= 1 && attempts <= 5)) {
      throw new RangeError(`attempts: ${attempts} is not in [1, 5]; 1 = never try again`);
    }
    const target = typeof address === "string" ? address : `ipv4:${address.join(",")}`;
    this.#client = new grpc.Client(target, channelCredentials(options), {
      "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
      "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
      "grpc.per_rpc_retry_buffer_size": 2 * MAX_MESSAGE_BYTES,
      "grpc.keepalive_time_ms": 60_000,
      "grpc.keepalive_timeout_ms": 20_000,
      "grpc.initial_reconnect_backoff_ms": 100,
      "grpc.max_reconnect_backoff_ms": 2_000,
      "grpc.service_config": JSON.stringify(serviceConfig(attempts)),
    });
  }

  /** Continues `prompt`: a text, token ids, or a conversation. */
  generate(prompt: Prompt, options: GenerateOptions = {}): GenerateStream {
    const request = generateRequest(prompt, options);
    const { path, requestSerialize, responseDeserialize } = methods.Generate;
    return new GenerateStream(
      () => this.#client.makeServerStreamRequest(path, requestSerialize, responseDeserialize, request, this.#metadata, deadline(options)),
      options.signal,
    );
  }

  /** Ends a request from outside its stream, which then ends well with finish "cancelled". False: it is not in flight. */
  async cancel(requestId: string, options: CallOptions = {}): Promise<boolean> {
    return (await this.#unary(methods.Cancel, { requestId }, options)).result === "CANCEL_RESULT_CANCELLED";
  }

  /** The text's token ids, as `generate` would use them. */
  async tokenize(text: string, options: TokenizeOptions = {}): Promise<Tokenization> {
    return one(await this.tokenizeBatch([text], options));
  }

  /** Like `tokenize`, for up to 1024 texts in one call. */
  async tokenizeBatch(texts: readonly string[], options: TokenizeOptions = {}): Promise<Tokenization[]> {
    return (await this.#unary(methods.Tokenize, tokenizeRequest(texts, options), options)).results.map(results.tokenization);
  }

  /** The text that token ids stand for. */
  async detokenize(tokenIds: readonly number[], options: DetokenizeOptions = {}): Promise<string> {
    return one(await this.detokenizeBatch([tokenIds], options));
  }

  /** Like `detokenize`, for up to 1024 sequences in one call. */
  async detokenizeBatch(sequences: readonly (readonly number[])[], options: DetokenizeOptions = {}): Promise<string[]> {
    return (await this.#unary(methods.Detokenize, detokenizeRequest(sequences, options), options)).texts;
  }

  /** The models that are loaded. */
  async models(options: CallOptions = {}): Promise<Model[]> {
    return (await this.#unary(methods.ListModels, {}, options)).models.map(results.model);
  }

  /** One model; without a name the only one loaded. */
  async model(name = "", options: CallOptions = {}): Promise<Model> {
    const { model } = await this.#unary(methods.GetModel, { name }, options);
    if (!model) throw new InternalError("the server sent no model", { code: grpc.status.UNKNOWN });
    return results.model(model);
  }

  /** Version, device, limits. */
  async serverInfo(options: CallOptions = {}): Promise<ServerInfo> {
    return results.serverInfo(await this.#unary(methods.GetServerInfo, {}, options));
  }

  /** What the server is doing now. */
  async load(options: CallOptions = {}): Promise<Load> {
    return results.load(await this.#unary(methods.GetLoad, {}, options));
  }

  /** Closes the connection; calls in flight end first. */
  close(): void {
    this.#client.close();
  }

  #unary<Request, Response>(method: UnaryMethod<Request, Response>, request: Request, options: CallOptions): Promise<Response> {
    const { signal } = options;
    return new Promise((resolve, reject) => {
      if (signal?.aborted) throw cancelled(signal);
      const { path, requestSerialize, responseDeserialize } = method;
      const call = this.#client.makeUnaryRequest(path, requestSerialize, responseDeserialize, request, this.#metadata, deadline(options), (error, response) => {
        signal?.removeEventListener("abort", cancel);
        if (error) reject(toPellucidError(error, signal));
        else resolve(response as Response);
      });
      const cancel = () => call.cancel();
      signal?.addEventListener("abort", cancel, { once: true });
    });
  }
}

interface UnaryMethod<Request, Response> {
  path: string;
  requestSerialize: Serialize<Request>;
  responseDeserialize: Deserialize<Response>;
}

/** Retries end with the first message; a pushback of the server decides how long to wait. Never hedging. */
function serviceConfig(attempts: number): object {
  const retryPolicy = {
    maxAttempts: attempts,
    initialBackoff: "0.1s",
    maxBackoff: "2s",
    backoffMultiplier: 2,
    retryableStatusCodes: ["UNAVAILABLE"],
  };
  return {
    loadBalancingConfig: [{ round_robin: {} }],
    methodConfig: attempts > 1 ? [{ name: [{}], retryPolicy }] : [],
  };
}

function deadline({ timeoutMs }: CallOptions): grpc.CallOptions {
  return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
}

function one<T>(values: T[]): T {
  const [value] = values;
  if (value === undefined || values.length !== 1) {
    throw new InternalError(`the server sent ${values.length} results for one input`, { code: grpc.status.UNKNOWN });
  }
  return value;
}
