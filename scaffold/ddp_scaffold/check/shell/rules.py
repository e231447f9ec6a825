"""The rules on variables and on the scripts that start a job, and how a finding of one of them is made."""

from __future__ import annotations

from ..findings import Finding, Rule

DOCS = "https://github.com/ddp-scaffold/ddp-scaffold/blob/main/docs/check.md"

RULES: tuple[Rule, ...] = (
    Rule("DDP150", "gloo-takes-no-pattern", "hang"),
    Rule("DDP151", "node-rank-of-the-batch-script", "hang"),
    Rule("DDP152", "master-address-of-each-node", "hang"),
    Rule("DDP153", "launcher-in-every-task", "hang"),
    Rule("DDP154", "more-processes-than-gpus", "hang"),
    Rule("DDP155", "localhost-on-several-nodes", "hang"),
    Rule("DDP156", "loopback-on-several-nodes", "hang"),
    Rule("DDP157", "no-node-rank", "hang"),
    Rule("DDP158", "other-nodes-not-started", "hang"),
    Rule("DDP159", "blocking-wait", "hang"),
    Rule("DDP160", "errors-only-logged", "hang"),
    Rule("DDP161", "infinite-timeout", "hang"),
    Rule("DDP162", "no-heartbeat-monitor", "hang"),
    Rule("DDP164", "value-ends-the-process", "hang"),
    Rule("DDP165", "quotes-in-the-value", "hang"),
    Rule("DDP250", "forced-protocol", "wrong-result"),
    Rule("DDP251", "each-node-trains-alone", "wrong-result"),
    Rule("DDP350", "signal-without-trap", "lost-work"),
    Rule("DDP351", "trap-behind-foreground", "lost-work"),
    Rule("DDP352", "signal-ends-torchrun", "lost-work"),
    Rule("DDP353", "unbounded-requeue", "lost-work"),
    Rule("DDP354", "unbounded-retry", "lost-work"),
    Rule("DDP355", "restart-on-a-used-store", "lost-work"),
    Rule("DDP360", "torchrun-takes-the-signal", "lost-work"),
    Rule("DDP450", "no-peer-to-peer", "slow"),
    Rule("DDP451", "no-shared-memory", "slow"),
    Rule("DDP452", "no-infiniband", "slow"),
    Rule("DDP453", "blocking-launches", "slow"),
    Rule("DDP454", "collectives-compared", "slow"),
    Rule("DDP455", "line-per-collective", "slow"),
    Rule("DDP456", "no-nvlink-sharp", "slow"),
    Rule("DDP457", "cpus-not-passed-to-srun", "slow"),
    Rule("DDP458", "more-workers-than-cpus", "slow"),
    Rule("DDP459", "idle-gpus", "slow"),
    Rule("DDP550", "directives-are-comments", "placebo"),
    Rule("DDP551", "directive-after-command", "placebo"),
    Rule("DDP552", "variable-in-directive", "placebo"),
    Rule("DDP553", "unread-variable", "placebo"),
    Rule("DDP554", "no-longer-read", "placebo"),
    Rule("DDP555", "not-yet-read", "placebo"),
    Rule("DDP556", "overruled-variable", "placebo"),
    Rule("DDP557", "mistyped-variable", "placebo"),
    Rule("DDP558", "variable-of-rpc", "placebo"),
    Rule("DDP559", "space-around-equals", "placebo"),
    Rule("DDP560", "set-too-late", "placebo"),
    Rule("DDP650", "directive-is-a-comment", "hygiene"),
    Rule("DDP651", "fixed-port", "hygiene"),
    Rule("DDP652", "ephemeral-port", "hygiene"),
    Rule("DDP653", "old-launcher", "hygiene"),
    Rule("DDP654", "abort-can-hang", "hygiene"),
    Rule("DDP655", "renamed-variable", "hygiene"),
    Rule("DDP656", "debugging-left-on", "hygiene"),
    Rule("DDP657", "pinned-tuning", "hygiene"),
    Rule("DDP658", "no-flight-record", "hygiene"),
    Rule("DDP659", "value-out-of-range", "hygiene"),
)
BY_ID = {rule.id: rule for rule in RULES}


def finding(rule: str, where: tuple[str, int, int], message: str, fix: str) -> Finding:
    """Return a finding of `rule` at file, line and column."""
    file, line, column = where
    return Finding(file, line, column, rule, BY_ID[rule].severity, message, fix, f"{DOCS}#{rule.lower()}")
