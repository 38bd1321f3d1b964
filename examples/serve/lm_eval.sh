#!/bin/sh
# lm-evaluation-harness against the server: pip install 'lm-eval[api]'. The log-likelihoods are the target's own.
set -eu
url="${SPRINTER_URL:-http://127.0.0.1:8000}"
exec lm_eval --model local-completions --tasks "${1:-lambada_openai}" --limit "${2:-200}" \
  --model_args "base_url=$url/v1/completions,model=${SPRINTER_MODEL:?name of the model, see $url/v1/models},tokenizer_backend=remote,num_concurrent=4,max_length=${SPRINTER_MAX_LEN:-2048}"
