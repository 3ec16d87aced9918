"""The section [evaluate] of a recipe."""

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from bloomery.core.chat import TEMPERATURE
from bloomery.core.config import VOLATILE, Between, Bytes, Config, Context, DiskPath, DocumentCount, Seed, Temperature
from bloomery.core.errors import ConfigError
from bloomery.evaluation import tasks as evaluation_tasks
from bloomery.hw.host import DeviceChoice

Questions = Annotated[int, Between(0, 10**6, "all are in memory, and each is an answer to write")]


class Evaluate(Config):
    toy_questions: Questions = 200
    """Validation questions of the generator, the same number of each kind."""
    conversations: Questions = 0
    """Number of validation conversations to score and to answer, before and after finetuning."""
    seed: Seed = 0
    """Seed of the questions."""
    max_tokens: Context = 48
    """Maximum length of an answer to a question or conversation."""
    chat_temperature: Temperature = TEMPERATURE
    """Sampling temperature in validation conversations, by default as in chat. 0 takes the most probable token."""
    domains: tuple[str, ...] = ()
    """The stage scores the validation text of these domains. Empty: of all domains."""
    val_bytes: Bytes = 400_000
    """Bytes of validation text of each domain, for the scores and for the compressors."""
    tasks: tuple[str, ...] = ()
    """Known tasks: hellaswag, arc_easy, …, as in the table of docs/understand/evaluation.md, or core."""
    data: tuple[DiskPath, ...] = ()
    """Files of the tasks, or folders of them. None: from the hub."""
    limit: DocumentCount | None = None
    """Questions of each task, sampled by `seed`. None: all."""
    num_fewshot: Annotated[int, Between(0, 1000, "no context holds more examples")] | None = None
    """Number of examples before each question. None: the task's own number."""
    samples: Annotated[int, Between(1, 10_000, "each is an answer to write")] = 1
    """Answers to each question of a task with generated answers."""
    temperature: Temperature = 0.0
    """Sampling temperature of these answers."""
    run_code: bool = False
    """Whether programs that the model writes may run, in the sandbox. Tasks that need it refuse to run without it."""
    allow_partial_sandbox: bool = False
    """Whether programs may also run where the kernel lacks some of the isolation."""
    device: DeviceChoice = Field("auto", json_schema_extra=VOLATILE)
    """Where evaluation runs. `auto`: a GPU if there is one, or else the CPU."""

    def packages(self) -> tuple[str, ...]:
        return ("pyarrow",)

    @field_validator("tasks")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            evaluation_tasks.named([name for name in names if name != evaluation_tasks.NAME])
        except ConfigError as error:
            raise ValueError(f"{error.what}. {error.hint}") from None
        return names

    @model_validator(mode="after")
    def _code_may_run(self) -> "Evaluate":
        runs = [
            name
            for name in self.tasks
            if name in evaluation_tasks.TASKS and evaluation_tasks.TASKS[name].kind == "program"
        ]
        if runs and not self.run_code:
            raise ValueError(
                f"tasks has {runs[0]}, which runs code that the model writes, and nobody has allowed that: say "
                "evaluate.run_code=true, or leave the task out"
            )
        return self
