/**
 * The public contract at run time: the services and messages of the .proto files that lie beside the built code, under
 * the types that `npm run generate` makes of the same files.
 */

import { fileURLToPath } from "node:url";
import { loadSync, type MessageTypeDefinition } from "@grpc/proto-loader";
import type { BadRequest, BadRequest__Output } from "./generated/google/rpc/BadRequest.js";
import type { ErrorInfo, ErrorInfo__Output } from "./generated/google/rpc/ErrorInfo.js";
import type { RetryInfo, RetryInfo__Output } from "./generated/google/rpc/RetryInfo.js";
import type { Status, Status__Output } from "./generated/google/rpc/Status.js";
import type { InferenceServiceDefinition } from "./generated/pellucid/v1/InferenceService.js";
import type { ModelServiceDefinition } from "./generated/pellucid/v1/ModelService.js";
import type { ServerServiceDefinition } from "./generated/pellucid/v1/ServerService.js";
import type { TokenizerServiceDefinition } from "./generated/pellucid/v1/TokenizerService.js";

// The options are those of the `generate` script in package.json: the types describe what they give.
const definitions = loadSync(
  ["inference", "model", "server", "tokenizer"].map((name) => `pellucid/v1/${name}.proto`).concat("google/rpc/details.proto"),
  {
    includeDirs: [fileURLToPath(new URL("../proto", import.meta.url))],
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
  },
) as unknown as {
  "pellucid.v1.InferenceService": InferenceServiceDefinition;
  "pellucid.v1.ModelService": ModelServiceDefinition;
  "pellucid.v1.ServerService": ServerServiceDefinition;
  "pellucid.v1.TokenizerService": TokenizerServiceDefinition;
  "google.rpc.Status": MessageTypeDefinition<Status, Status__Output>;
  "google.rpc.ErrorInfo": MessageTypeDefinition<ErrorInfo, ErrorInfo__Output>;
  "google.rpc.BadRequest": MessageTypeDefinition<BadRequest, BadRequest__Output>;
  "google.rpc.RetryInfo": MessageTypeDefinition<RetryInfo, RetryInfo__Output>;
};

export const methods = {
  ...definitions["pellucid.v1.InferenceService"],
  ...definitions["pellucid.v1.ModelService"],
  ...definitions["pellucid.v1.ServerService"],
  ...definitions["pellucid.v1.TokenizerService"],
} as InferenceServiceDefinition & ModelServiceDefinition & ServerServiceDefinition & TokenizerServiceDefinition;

export const status = definitions["google.rpc.Status"];
export const errorInfo = definitions["google.rpc.ErrorInfo"];
export const badRequest = definitions["google.rpc.BadRequest"];
export const retryInfo = definitions["google.rpc.RetryInfo"];
