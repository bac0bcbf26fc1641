/**
 * Every error that the client throws, and the one place where a failed call becomes one of them.
 *
 *     PellucidError
 *     ├── InvalidRequest        a field is wrong: `violations` names each one
 *     │   └── PromptTooLong
 *     ├── ModelNotFound
 *     ├── RequestIdInUse
 *     ├── ResourceExhausted
 *     │   ├── Overloaded        the queue is full: try again after `retryAfterMs`
 *     │   ├── RequestTooLarge
 *     │   └── SlowConsumer
 *     ├── Unavailable           loading, draining or restarting: try again after `retryAfterMs`
 *     │   └── ConnectionFailed  no server answers, or the connection broke
 *     ├── DeadlineExceeded      `timeoutMs` passed
 *     ├── Cancelled             aborted on this side; `cause` is the signal's reason
 *     ├── Unauthenticated
 *     ├── PermissionDenied
 *     └── InternalError
 */

import { status as Code, type ServiceError } from "@grpc/grpc-js";
import * as contract from "./contract.js";
import { toMilliseconds } from "./results.js";

/** One field that the server does not accept. */
export interface Violation {
  /** Path in the request message, such as "sampling.temperature". */
  field: string;
  /** The value and the accepted range. */
  description: string;
}

export interface ErrorDetails {
  /** gRPC status code. */
  code: Code;
  /** The server's reason, such as "QUEUE_FULL"; undefined where it gave none. */
  reason?: string;
  /** What the server added to the reason, such as the request's id. */
  metadata?: Record<string, string>;
  violations?: Violation[];
  /** Milliseconds after which the server expects to do better; undefined where it does not say. */
  retryAfterMs?: number;
  cause?: unknown;
}

/** A call failed. */
export class PellucidError extends Error {
  readonly code: Code;
  readonly reason: string | undefined;
  readonly metadata: Record<string, string>;
  readonly violations: readonly Violation[];
  readonly retryAfterMs: number | undefined;

  constructor(message: string, details: ErrorDetails) {
    super(message, { cause: details.cause });
    this.name = new.target.name;
    this.code = details.code;
    this.reason = details.reason;
    this.metadata = details.metadata ?? {};
    this.violations = details.violations ?? [];
    this.retryAfterMs = details.retryAfterMs;
  }
}

export class InvalidRequest extends PellucidError {}
export class PromptTooLong extends InvalidRequest {}
export class ModelNotFound extends PellucidError {}
export class RequestIdInUse extends PellucidError {}
export class ResourceExhausted extends PellucidError {}
export class Overloaded extends ResourceExhausted {}
export class RequestTooLarge extends ResourceExhausted {}
export class SlowConsumer extends ResourceExhausted {}
export class Unavailable extends PellucidError {}
export class ConnectionFailed extends Unavailable {}
export class DeadlineExceeded extends PellucidError {}
export class Cancelled extends PellucidError {}
export class Unauthenticated extends PellucidError {}
export class PermissionDenied extends PellucidError {}
export class InternalError extends PellucidError {}

const byReason: Record<string, typeof PellucidError> = {
  PROMPT_TOO_LONG: PromptTooLong,
  QUEUE_FULL: Overloaded,
  TENANT_QUOTA: Overloaded,
  REQUEST_TOO_LARGE: RequestTooLarge,
  SLOW_CONSUMER: SlowConsumer,
};

const byCode: Partial<Record<Code, typeof PellucidError>> = {
  [Code.INVALID_ARGUMENT]: InvalidRequest,
  [Code.NOT_FOUND]: ModelNotFound,
  [Code.ALREADY_EXISTS]: RequestIdInUse,
  [Code.RESOURCE_EXHAUSTED]: ResourceExhausted,
  [Code.UNAVAILABLE]: Unavailable,
  [Code.DEADLINE_EXCEEDED]: DeadlineExceeded,
  [Code.CANCELLED]: Cancelled,
  [Code.UNAUTHENTICATED]: Unauthenticated,
  [Code.PERMISSION_DENIED]: PermissionDenied,
  [Code.INTERNAL]: InternalError,
  [Code.UNKNOWN]: InternalError,
  [Code.DATA_LOSS]: InternalError,
};

/** What is thrown instead of `error`, which may be a failed call's or anything else. */
export function toPellucidError(error: unknown, signal?: AbortSignal): unknown {
  if (!isServiceError(error)) return error;
  const details: ErrorDetails = { code: error.code, cause: error, ...googleDetails(error) };
  if (error.code === Code.CANCELLED && signal?.aborted) details.cause = signal.reason;
  return new (kind(error.code, details.reason))(error.details || (Code[error.code] ?? String(error.code)), details);
}

function kind(code: Code, reason: string | undefined): typeof PellucidError {
  const named = reason === undefined ? undefined : byReason[reason];
  if (named) return named;
  // gRPC's own: a Pellucid server always gives a reason.
  if (code === Code.UNAVAILABLE && reason === undefined) return ConnectionFailed;
  return byCode[code] ?? PellucidError;
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error && !(error instanceof PellucidError);
}

function googleDetails(error: ServiceError): Partial<ErrorDetails> {
  const found: Partial<ErrorDetails> = {};
  const packed = error.metadata.get("grpc-status-details-bin")[0];
  if (!Buffer.isBuffer(packed)) return found;
  for (const { type_url: url, value } of contract.status.deserialize(packed).details) {
    const bytes = Buffer.from(value as Uint8Array);
    if (url.endsWith("/google.rpc.ErrorInfo")) {
      const info = contract.errorInfo.deserialize(bytes);
      found.reason = info.reason;
      found.metadata = info.metadata;
    } else if (url.endsWith("/google.rpc.BadRequest")) {
      found.violations = contract.badRequest.deserialize(bytes).fieldViolations.map(({ field, description }) => ({ field, description }));
    } else if (url.endsWith("/google.rpc.RetryInfo")) {
      found.retryAfterMs = toMilliseconds(contract.retryInfo.deserialize(bytes).retryDelay);
    }
  }
  return found;
}
