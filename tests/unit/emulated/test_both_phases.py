"""Both phases on one machine, with little memory: arriving KV must not starve the prompts it waits for."""

from __future__ import annotations

from services.engine.emulated import EmulatedSettings, expected_tokens
from services.engine.emulated.machine import EmulatedMachine
from services.engine.interface import PromptWork, TokenWork, Transfer, WorkKey
from splitwise.rpc.v1.common_pb2 import SamplingParams
from tests.support.loopback_daemon import Client, Daemon

SETTINGS = EmulatedSettings(kv_blocks=32, block_tokens=4, layers=2, max_model_len=40)


def test_token_phases_that_come_first_leave_room_for_their_prompts() -> None:
    daemon = Daemon()
    client = Client(daemon, SETTINGS.layers)
    machine = client.machine = EmulatedMachine(SETTINGS, client)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [[300 + i] * 30 for i in range(8)]  # eight blocks each, of 32
    transfers = [Transfer(bytes([i]) * 16, 1) for i in range(1, 9)]
    tokens = [
        machine.submit_token(TokenWork(WorkKey(str(i), 1), prompts[i], sampling, transfers[i], "", "", 1000))
        for i in range(8)
    ]
    assert machine.begin() is None  # as many reserve blocks as may
    for i in range(8):
        machine.submit_prompt(PromptWork(WorkKey(str(i), 1), prompts[i], sampling, transfers[i], 2))
    for _ in range(400):
        iteration = machine.begin()
        if iteration is not None:
            for layer in range(SETTINGS.layers):
                machine.write_layer(iteration, layer)
            machine.finish(iteration)
        for key, push in list(daemon.pushes.items()):
            if push.deliverable:
                daemon.deliver(key)
        while client.notices:
            machine.take_notice(client.notices.pop(0))
    for prompt, token in zip(prompts, tokens, strict=True):
        assert token.tokens[30:] == expected_tokens(SETTINGS, prompt, 8)
    assert machine.allocator.used == 0
