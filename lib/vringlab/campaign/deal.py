"""Who measures which boot: a plan's boots dealt to hosts in turn, and dealt again when one is lost.

Each boot has blocks with every arm, so a host that has one runs all arms. A host that has done its
own boots takes one of a host that is slower or lost; the first boot of a host that is still coming
up is left to it, so that every host takes part.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from vringlab.campaign.plan import Cell

Boot = tuple[str, list[list[Cell]]]


class Deal:
    """The boots of an execution that wait; for use by one thread per host.

    Args:
        boots: Name and blocks of each boot, in the plan's order.
        hosts: Names of the hosts.
    """

    def __init__(self, boots: Sequence[Boot], hosts: Sequence[str]) -> None:
        self._own = {host: deque(boots[n :: len(hosts)]) for n, host in enumerate(hosts)}
        self._back: deque[Boot] = deque()
        self._here = set(hosts)
        self._busy: set[str] = set()
        self._begun: set[str] = set()
        self._over = False
        self._changed = threading.Condition()

    def take(self, host: str) -> Boot | None:
        """The next boot for a host, whose last one is then done; None when all are.

        Waits while other hosts measure, since what they cannot do would be this one's.
        """
        with self._changed:
            self._busy.discard(host)
            self._changed.notify_all()
            while not self._over:
                boot = self._next(host)
                if boot is not None:
                    self._busy.add(host)
                    self._begun.add(host)
                    return boot
                if not self._busy and not self._waiting():
                    return None
                self._changed.wait()
            return None

    def _next(self, host: str) -> Boot | None:
        if self._own[host]:
            return self._own[host].popleft()
        if self._back:
            return self._back.popleft()
        others = [name for name in self._own if self._spare(name)]
        if not others:
            return None
        longest = max(others, key=lambda name: (name not in self._here, len(self._own[name])))
        return self._own[longest].pop()

    def _spare(self, host: str) -> bool:
        """Whether others may take a boot of this host."""
        kept = 1 if host in self._here and host not in self._begun else 0
        return len(self._own[host]) > kept

    def _waiting(self) -> bool:
        """Whether a host that is still there has boots of its own."""
        return any(self._own[host] for host in self._here)

    def leave(self, host: str, rest: Boot | None = None) -> None:
        """A host takes no more boots.

        Args:
            host: Its name.
            rest: What is left of the boot that it measured, for others.
        """
        with self._changed:
            if rest is not None and rest[1]:
                self._back.append(rest)
            self._here.discard(host)
            self._busy.discard(host)
            self._changed.notify_all()

    def end(self) -> None:
        """Deal no more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
