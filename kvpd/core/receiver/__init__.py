"""The receiver's decisions, in layers: each module uses only those before it.

base       the books, the deadlines, the way to answer and to report
reading    claims and releases
rollback   every end without success, and the fence
peers      sessions, leases, cancels
admission  who gets room, where chunks are placed, when a transfer is complete
core       ReceiverCore: one event in, its actions out

The books they share: transfers (who holds which slots), sessions, claims; and, a room further out, pool and ledger.
"""

from kvpd.core.receiver.core import ReceiverCore
from kvpd.core.receiver.settings import ReceiverSettings

__all__ = ["ReceiverCore", "ReceiverSettings"]
