"""Counts the launches of our CUDA kernels, whichever way they are made."""

from __future__ import annotations


def counted_launches(monkeypatch):
    """From here on, the Launch of each kernel that is launched, in order."""
    from gradilocks.kernels.triton_launch import BoundLaunch, Launch

    seen, call, call_bound = [], Launch.__call__, BoundLaunch.__call__
    bound = []  # One that is bound may have its Launch called.

    def counting(self, *args):
        if not bound:
            seen.append(self)
        call(self, *args)

    def counting_bound(self, *args):
        seen.append(self._launch)
        bound.append(self)
        try:
            call_bound(self, *args)
        finally:
            bound.pop()

    quick = BoundLaunch.quick.fget

    def counting_quick(self):
        """What a step that is taken again launches by, without the BoundLaunch."""
        real = quick(self)

        def launch(*args):
            seen.append(self._launch)
            return real(*args)

        return None if real is None else launch

    monkeypatch.setattr(BoundLaunch, "quick", property(counting_quick))
    monkeypatch.setattr(Launch, "__call__", counting)
    monkeypatch.setattr(BoundLaunch, "__call__", counting_bound)
    return seen


def kernels_of(launches):
    """The names of their kernels."""
    return [launch._kernel.__name__ for launch in launches]
