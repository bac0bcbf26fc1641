/** TLS and tokens: from what a caller names to gRPC's credentials and metadata. */

import { readFileSync } from "node:fs";
import { type ChannelCredentials, credentials as grpcCredentials } from "@grpc/grpc-js";

const TOKEN = /^[A-Za-z0-9\-._~+/]+=*$/; // RFC 6750, section 2.1.

/** Naming a file asks for TLS too. */
export interface SecurityOptions {
  /** Encrypt, and hold the server's certificate against the system's authorities. */
  tls?: boolean;
  /** PEM file of authorities to hold it against instead. */
  caCertificate?: string;
  /** PEM files of a client certificate, for servers that want one. */
  certificate?: string;
  key?: string;
  /** Bearer token, for servers that want one; without TLS anybody on the way can read it. */
  token?: string;
  /** gRPC's own, in place of all of TLS above. */
  credentials?: ChannelCredentials;
}

/** Throws TypeError for what does not go together, and as readFileSync for files that cannot be read. */
export function channelCredentials({ tls = false, caCertificate, certificate, key, credentials }: SecurityOptions): ChannelCredentials {
  const named = caCertificate !== undefined || certificate !== undefined || key !== undefined;
  if (credentials !== undefined) {
    if (tls || named) throw new TypeError("credentials: leave out tls, caCertificate, certificate and key, or credentials itself");
    return credentials;
  }
  if ((certificate === undefined) !== (key === undefined)) throw new TypeError("certificate, key: a client certificate needs both");
  if (!tls && !named) return grpcCredentials.createInsecure();
  return grpcCredentials.createSsl(content(caCertificate), content(key), content(certificate));
}

/** What goes with every call. Throws TypeError for what cannot be a bearer token, without showing it. */
export function tokenMetadata(token: string | undefined): Record<string, string> {
  if (token === undefined) return {};
  if (!TOKEN.test(token)) throw new TypeError("token: accepted are letters, digits and -._~+/, without blanks and line breaks");
  return { authorization: `Bearer ${token}` };
}

function content(path: string | undefined): Buffer | null {
  return path === undefined ? null : readFileSync(path);
}
