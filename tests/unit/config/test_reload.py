"""What a running process takes up of changed settings, and what it only names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.config import Settings
from splitwise.config.reload import is_live, leaves, plan_reload
from splitwise.errors import ConfigError

ROUTER = {
    "policy": st.sampled_from(["jsq", "random"]),
    "queue_limit": st.integers(0, 9),
    "restart_limit": st.integers(0, 9),
    "router_id": st.sampled_from(["a", "b"]),
    "load_report_ms": st.integers(10, 20),
    "drain_s": st.floats(0, 9),
}


def settings(**router: Any) -> Settings:
    return Settings.model_validate({"router": router})


def test_live_values_are_taken_up_and_others_named() -> None:
    running = settings(queue_limit=1, listen="127.0.0.1:1", slo={"ttft_ms": 5})
    wanted = Settings.model_validate(
        {
            "router": {"queue_limit": 2, "listen": "127.0.0.1:2", "slo": {"ttft_ms": 7, "e2e_ms": 9}},
            "telemetry": {"log_level": "debug", "log_format": "json"},
            "tls": {"ca": "a", "certificate": "b", "key": "c"},
        }
    )
    outcome = plan_reload(running, wanted, "router")
    assert outcome.applied == (
        "router.slo.ttft_ms",
        "router.slo.e2e_ms",
        "router.queue_limit",
        "telemetry.log_level",
    )
    waiting = ("router.listen", "tls.ca", "tls.certificate", "tls.key", "telemetry.log_format")
    assert outcome.needs_restart == waiting
    assert outcome.settings.router.queue_limit == 2
    assert outcome.settings.router.slo.e2e_ms == 9
    assert outcome.settings.telemetry.log_level == "debug"
    assert str(outcome.settings.router.listen) == "127.0.0.1:1"
    assert not outcome.settings.tls.on


def test_other_processes_sections_are_not_looked_at() -> None:
    wanted = Settings.model_validate({"kvd": {"drain_s": 1}, "machine": {"id": "x", "max_waiting": 2}})
    outcome = plan_reload(Settings(), wanted, "router")
    assert (outcome.applied, outcome.needs_restart) == ((), ())
    assert outcome.settings == Settings()


def test_values_that_do_not_go_together_are_refused_whole() -> None:
    running = settings(heartbeat_ms=1000, machine_lease_ms=5000)
    with pytest.raises(ConfigError, match=r"router\.last_resort_tokens|router\.machine_lease_ms"):
        # valid by itself is checked when the file is read; here the running value makes it wrong
        plan_reload(running, _unchecked(running, machine_lease_ms=1500), "router")


def _unchecked(base: Settings, **router: Any) -> Settings:
    return base.model_copy(update={"router": base.router.model_copy(update=router)})


@given(st.fixed_dictionaries({}, optional=ROUTER), st.fixed_dictionaries({}, optional=ROUTER))
def test_every_change_is_either_taken_up_or_named(one: dict[str, Any], two: dict[str, Any]) -> None:
    running, wanted = settings(**one), settings(**two)
    outcome = plan_reload(running, wanted, "router")
    for key, field in leaves("router"):
        name = ".".join(key)
        old, new, now = running, wanted, outcome.settings
        for part in key:
            old, new, now = getattr(old, part), getattr(new, part), getattr(now, part)
        assert (name in outcome.applied) == (old != new and is_live(field))
        assert (name in outcome.needs_restart) == (old != new and not is_live(field))
        assert now == (new if is_live(field) else old)
    again = plan_reload(outcome.settings, wanted, "router")
    assert again.applied == ()


def test_a_list_and_a_map_are_one_value() -> None:
    running, wanted = settings(), settings(machines=["127.0.0.1:1"], models={"m": "/x"})
    assert plan_reload(running, wanted, "router").needs_restart == ("router.models", "router.machines")
