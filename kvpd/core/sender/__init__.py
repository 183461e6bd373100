"""The sender's decisions, in layers: each module uses only those before it.

base     the records, the deadlines, the way to send and to report
ending   cancels, drains, ends, and the proxy's notification
peers    sessions, leases, revocations
opening  a request's transfer begins, other ranks join it, room is asked for
moving   its batches are allocated, staged, put and acknowledged
core     SenderCore: one event in, its actions out

They share: records (peers, transfers and what each rank does for them), joining (whose open belongs to which
transfer), staging (who gets slots next), notifier.
"""

from kvpd.core.sender.core import SenderCore
from kvpd.core.sender.settings import SenderSettings

__all__ = ["SenderCore", "SenderSettings"]
