"""The words in `Decision.reason`: stable, machine-readable, each explained once here."""

from __future__ import annotations

from splitwise.scheduling.policies import (
    HOW_BORROWED,
    HOW_LAST_RESORT,
    HOW_MIXED,
    HOW_NOT_NEEDED,
    HOW_OWN_POOL,
    HOW_PREFIX,
    POLICIES,
)

# Assign: "<policy>:<how the prompt machine was found>/<how the token machine was found>".
_PROMPT_HOW = {
    HOW_OWN_POOL: "prompt-pool",
    HOW_MIXED: "mixed-pool",
    HOW_BORROWED: "borrowed",  # prompt pool past its threshold, nobody mixed: from the token pool
    HOW_LAST_RESORT: "last-resort",  # one machine takes both phases
    HOW_PREFIX: "prefix-cached",  # queue plus uncached prompt was shortest there
}
_TOKEN_HOW = {
    HOW_OWN_POOL: "token-pool",
    HOW_MIXED: "mixed-pool",
    HOW_BORROWED: "borrowed",
    HOW_LAST_RESORT: "last-resort",
    HOW_NOT_NEEDED: "no-token-phase",  # the first token will be the last
}
ASSIGN = {
    (policy, prompt, token): f"{policy}:{_PROMPT_HOW[prompt]}/{_TOKEN_HOW[token]}"
    for policy in POLICIES
    for prompt in _PROMPT_HOW
    for token in _TOKEN_HOW
}

# Enqueue and Reject
ALL_BUSY = "queue:all-busy"
BEHIND_OTHERS = "queue:behind-others"  # first come, first served
QUEUE_FULL = "queue:full"
NO_MACHINE = "machines:none"

# MovePool
BORROW = "pool:borrow"
RETURN = "pool:return"

# CancelAttempt, Restart, Finish, Fail, Cancelled
MACHINE_LOST = "machine:lost"
MACHINE_REPLACED = "machine:new-incarnation"
PROMPT_FAILED = "attempt:prompt-failed"
TOKEN_FAILED = "attempt:token-failed"  # noqa: S105 - a reason, not a secret
FIRST_IS_LAST = "finish:first-token"
LAST_TOKEN = "finish:last-token"  # noqa: S105 - a reason, not a secret
ALL_MADE = "finish:all-tokens-made"
CLIENT = "client:cancelled"
DEADLINE = "deadline:passed"
INVALID = "request:invalid"
TOO_LARGE = "request:larger-than-kv"
ATTEMPTS_SPENT = "attempts:spent"

# RefuseMachine: reason and code
STALE_INCARNATION = "stale_incarnation"
KV_FINGERPRINT = "kv_fingerprint"
BAD_DESCRIPTION = "bad_description"
IDENTITY_CONFLICT = "identity_conflict"  # same id and incarnation, other facts

# Ignore
DUPLICATE_REQUEST = "ignore:duplicate-request"
UNKNOWN_REQUEST = "ignore:unknown-request"
OTHER_ATTEMPT = "ignore:other-attempt"
OUT_OF_PLACE = "ignore:out-of-place"
UNKNOWN_MACHINE = "ignore:unknown-machine"
OTHER_INCARNATION = "ignore:other-incarnation"
RENEWED = "ignore:already-registered"
ALREADY_SO = "ignore:already-so"
STALE_REPORT = "ignore:stale-report"
FUTURE_REPORT = "ignore:report-from-the-future"
BAD_VALUE = "ignore:bad-value"
