"""The models that this cluster serves: their tokenizers and limits, from what machines say."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError, NotFoundError, PreconditionError, UnavailableError
from splitwise.models import read_sampling_defaults
from splitwise.rpc.v1.common_pb2 import SamplingParams
from splitwise.text import ByteVocabulary, load_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from splitwise.rpc.v1.common_pb2 import MachineDescription
    from splitwise.text import Vocabulary


@dataclass(frozen=True, slots=True)
class Model:
    """One model. `max_model_len` is the least of its machines': any of them must do."""

    name: str
    vocabulary: Vocabulary
    vocab_size: int
    max_model_len: int
    block_tokens: int
    recommended: SamplingParams  # what its makers would have where a request says nothing


class Models:
    """Models by name. A model stays known when its machines are gone, so that errors say UNAVAILABLE."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """`folders`: where the router finds a model's tokenizer, if not where the machine does."""
        self._folders = folders
        self._models: dict[str, Model] = {}
        self._loading = asyncio.Lock()

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def get(self, name: str) -> Model:
        """Return a model; an empty name means the only one.

        Raises `NotFoundError`, or `UnavailableError` before the first machine has registered.
        """
        if not self._models:
            raise UnavailableError("no machine has registered yet: retry, or start one", retry_after=1.0)
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(name)
        if model is not None:
            return model
        known = ", ".join(sorted(self._models))
        if not name:
            raise NotFoundError(f"model: name one of {known}", code="NOT_FOUND")
        raise NotFoundError(f"model: {name[:80]!r} is not served here (served: {known})", code="NOT_FOUND")

    async def read(self, machine: MachineDescription) -> Model:
        """Return the model as this machine has it, nothing changed yet.

        Raises `PreconditionError` when its folder cannot be read.
        """
        async with self._loading:
            known = self._models.get(machine.model)
            vocabulary, recommended = (
                (known.vocabulary, known.recommended)
                if known is not None
                else await asyncio.to_thread(self._load, machine)
            )
            return Model(
                machine.model,
                vocabulary,
                machine.vocab_size or vocabulary.size,
                machine.max_model_len,
                machine.block_tokens,
                recommended,
            )

    def learn(self, model: Model, *, alone: bool) -> None:
        """Take a model up with a machine that joined; `alone`: it is the model's only machine.

        The limit is the least of the machines', and that of a lone machine its own: a cluster
        that was restarted with another limit has that limit.
        """
        known = self._models.get(model.name)
        if known is not None and not alone:
            model = replace(known, max_model_len=min(known.max_model_len, model.max_model_len))
        self._models[model.name] = model

    def _load(self, machine: MachineDescription) -> tuple[Vocabulary, SamplingParams]:
        folder = self._folders.get(machine.model)
        if folder is None and not machine.tokenizer:
            return ByteVocabulary(machine.vocab_size), SamplingParams()
        try:
            place = folder or Path(machine.tokenizer)
            return load_vocabulary(place), read_sampling_defaults(place)
        except ConfigError as error:
            raise PreconditionError(
                f"the router cannot read the tokenizer of model {machine.model!r}: {error}."
                f" Set router.models.{machine.model} to the model's folder on the router's host",
                code="FAILED_PRECONDITION",
            ) from error
