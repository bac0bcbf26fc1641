#!/bin/sh
# Any gRPC client works: the server explains itself through reflection. Run it with `examples/buf_curl.sh [HOST:PORT]`;
# buf comes with `pip install buf-bin`.
set -eu
server=http://${1:-127.0.0.1:50051}

call() {
  buf curl --protocol grpc --http2-prior-knowledge --data "$2" "$server/$1"
}

call grpc.health.v1.Health/Check '{}'
call pellucid.v1.ModelService/ListModels '{}'
call pellucid.v1.TokenizerService/Tokenize '{"texts": ["今天天气"]}'
call pellucid.v1.InferenceService/Generate '{
  "text": "今天天气",
  "sampling": {"temperature": 0},
  "stopping": {"maxNewTokens": 20, "stopStrings": ["。"]}
}'
