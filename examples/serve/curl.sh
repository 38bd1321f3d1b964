#!/bin/sh
# What speculation did, request by request. SPRINTER_URL: of the server.
set -eu
url="${SPRINTER_URL:-http://127.0.0.1:8000}"
ask() { curl -sS "$url/v1/completions" -H 'content-type: application/json' -d "$1"; echo; }
ask '{"prompt": "The river rises in", "max_tokens": 24, "seed": 1}'
ask '{"prompt": "The river rises in", "max_tokens": 24, "seed": 1, "sprinter": {"method": "certain(threshold=1.0)"}}'
# A lossy method where the client insists on the target's own law: refused with 400.
ask '{"prompt": "The river rises in", "sprinter": {"method": "sprinter", "require_lossless": true}}'
curl -sS "$url/metrics" | grep -E '^(vllm:spec_decode|sprinter_(target_calls|drift))\w*_total' || true
