"""A plain model of an engine that computes prompts in order, in steps of so many tokens."""

from collections import deque

EPSILON_S = 1e-9


class StepEngine:
    """Prompts by number, each token takes `token_s`. A step that has begun takes nothing in.

    The caller gives it prompts, then calls `begin`, so that what comes at one time is one step.
    """

    def __init__(self, step_tokens: int, token_s: float) -> None:
        self._step_tokens = step_tokens
        self._token_s = token_s
        self._waiting: deque[list[int]] = deque()  # [number, tokens not in a step yet]
        self._step: dict[int, int] = {}  # tokens by number
        self._ends_in_step: list[int] = []
        self._began_s = 0.0
        self._computed: dict[int, int] = {}  # tokens by number, of steps that have ended
        self.joined: dict[int, int] = {}  # tokens of later prompts in the step in which it ended
        self.ended_s: dict[int, float] = {}

    @property
    def step_end_s(self) -> float | None:
        """When the step that runs ends; None: it is idle."""
        return self._began_s + self._token_s * sum(self._step.values()) if self._step else None

    def add(self, number: int, n_tokens: int) -> None:
        """Put a prompt at the end; numbers ascend."""
        self._waiting.append([number, n_tokens])

    def cancel(self, number: int) -> None:
        """Take a prompt out; what is in the step that runs is computed all the same."""
        self._waiting = deque(each for each in self._waiting if each[0] != number)
        self._ends_in_step = [each for each in self._ends_in_step if each != number]

    def begin(self, now_s: float) -> None:
        """Begin a step, where none runs."""
        if self._step:
            return
        self._began_s, room = now_s, self._step_tokens
        while room and self._waiting:
            first = self._waiting[0]
            n_tokens = min(room, first[1])
            self._step[first[0]] = n_tokens
            room -= n_tokens
            first[1] -= n_tokens
            if not first[1]:
                self._ends_in_step.append(self._waiting.popleft()[0])

    def end_step(self) -> list[int]:
        """End the step that runs; the prompts that it has computed, in order."""
        end_s, ended = self.step_end_s, self._ends_in_step
        assert end_s is not None
        for number, n_tokens in self._step.items():
            self._computed[number] = self._computed.get(number, 0) + n_tokens
        for number in ended:
            self.ended_s[number] = end_s
            self.joined[number] = sum(n for other, n in self._step.items() if other > number)
        self._step, self._ends_in_step = {}, []
        return ended

    def computed_tokens(self, numbers: list[int], now_s: float) -> float:
        """Tokens of these prompts that are computed, the part of the step that runs included."""
        done = float(sum(self._computed.get(number, 0) for number in numbers))
        room = (now_s - self._began_s) / self._token_s
        for number, n_tokens in self._step.items():
            part = min(room, n_tokens)
            room -= part
            done += part if number in numbers else 0.0
        return done
