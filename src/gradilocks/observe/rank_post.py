"""What a rank tells of its steps enters, on any rank; it leaves on rank 0, which nobody waits for.

No collective: one that the script does not have would hang wherever ranks step differently often.
Rank 0 opens a small store of its own (torch's TCPStore) and leaves its address in the store that
the script's ranks have met by. The others put their letters there, and rank 0 takes them out. All
of it happens in a thread; what fails there is told to nobody, and the letters do not come.
"""

from __future__ import annotations

import _thread
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, cast

from gradilocks._torch import default_store

__all__ = ["RankPost"]

_MOST_LETTERS = 4096  # That wait for a rank 0 which nobody can reach.
_PATIENCE = timedelta(seconds=2.5)  # With a store that does not answer.
_OFTEN, _SELDOM = 0.05, 0.5  # Seconds between two looks.


class RankPost:
    """Brings letters to rank 0, in a thread; made on every rank once they have met.

    Args:
        rank: this one.
        ranks: how many there are.
        name: tells it from others of these ranks.
        often: seconds between two looks of rank 0 at what has come.
    """

    def __init__(self, rank: int, ranks: int, name: str, *, often: float = _OFTEN) -> None:
        self._rank, self._ranks, self._often = rank, ranks, often
        self._address = f"gradilocks/{name}"
        self._letters: deque[str] = deque(maxlen=_MOST_LETTERS)
        self._came: deque[Any] = deque()
        self._until = float("inf")
        self._closing = False
        self._wake, self._ended = threading.Event(), threading.Event()
        # The address stays there until all have it, also if the script leaves its group at once.
        self._script_store = default_store()
        self._own_store: Any = None
        if self._script_store is None:
            self._ended.set()
            return
        try:
            if rank == 0:
                self._open()
            _thread.start_new_thread(self._work, ())
        except Exception:  # No port or no thread: nothing comes, and that is told of every step.
            self._ended.set()

    def send(self, letter: Any) -> None:
        """Tells rank 0 something that JSON can hold; does not wait."""
        if not self._ended.is_set():
            self._letters.append(json.dumps(letter))
            self._wake.set()

    def received(self) -> list[Any]:
        """On rank 0, what has come since it was last asked for; does not wait."""
        return [self._came.popleft() for _ in range(len(self._came))]

    def close(self, seconds: float) -> None:
        """Ends it: waits at most so long for what is still to be sent."""
        self._until, self._closing = time.monotonic() + seconds, True
        if self._rank == 0:
            self._until = 0.0
        self._wake.set()
        self._ended.wait(seconds)
        self._own_store = self._script_store = None

    def _open(self) -> None:
        self._own_store = _tcp_store("localhost", 0, is_master=True)
        token = secrets.token_hex(8)
        self._own_store.set("token", token)
        hosts = [os.environ.get("MASTER_ADDR"), socket.gethostname()]
        address = {"hosts": hosts, "port": self._own_store.port, "token": token}
        self._script_store.set(self._address, json.dumps(address))

    def _work(self) -> None:
        try:
            if self._rank == 0:
                self._receive()
            else:
                self._deliver()
        except Exception:  # A store that is gone: rank 0 has ended, or somebody has ended it.
            self._letters.clear()
        finally:
            self._ended.set()

    def _receive(self) -> None:
        store, seen = self._own_store, 0
        missing: list[int] = []
        while time.monotonic() < self._until:
            sent = store.add("sent", 0)
            missing += range(seen + 1, sent + 1)
            seen = sent
            for number in list(missing):
                name = f"letter/{number}"
                if store.check([name]):  # Its number is given out before it is there.
                    self._came.append(json.loads(store.get(name)))
                    store.delete_key(name)
                    missing.remove(number)
            if self._script_store is not None and store.add("here", 0) >= self._ranks - 1:
                self._script_store = None
            self._wake.wait(self._often)

    def _deliver(self) -> None:
        store = self._reached()
        while store is not None and time.monotonic() < self._until:
            while self._letters and time.monotonic() < self._until:
                store.set(f"letter/{store.add('sent', 1)}", self._letters[0])
                self._letters.popleft()
            if self._closing and not self._letters:
                return
            self._wake.wait(_SELDOM)
            self._wake.clear()

    def _reached(self) -> Any:
        """Rank 0's store, once that has said where it is; None if it cannot be reached."""
        while not self._script_store.check([self._address]):
            if time.monotonic() >= self._until:
                return None
            time.sleep(_OFTEN)
        address = json.loads(self._script_store.get(self._address))
        self._script_store = None
        for host in dict.fromkeys(filter(None, address["hosts"])):
            try:
                store = _tcp_store(host, address["port"], is_master=False)
                if store.check(["token"]) and store.get("token").decode() == address["token"]:
                    store.add("here", 1)
                    return store
            except Exception:
                continue
        return None


def _tcp_store(host: str, port: int, *, is_master: bool) -> Any:
    import torch.distributed as dist

    return cast("Any", dist).TCPStore(
        host, port, is_master=is_master, wait_for_workers=False, timeout=_PATIENCE
    )
