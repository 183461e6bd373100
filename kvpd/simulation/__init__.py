"""Worlds in which everything goes wrong, around the real cores.

Drawn at random from a seed (scripts/simulate), each module using only those before it:

schedule, network, plane                virtual time, control messages, writes and where they land
shell, sender, receiver                 the real cores, their actions carried out as kvpd.service does
scenario, workload, arrivals            what is asked, and what goes wrong
rules, truth, ages, coverage            what must be true, the world's own books, what was exercised
sender_checks, receiver_checks          every rule, after every event
engines, proxy, population, rogue       everybody else, and how all start and die
trace, faults, world                    one run
service_daemons, service                the same scenarios over the real trio service
shrink, run, report, command            many runs, and what is told of them

Searched exhaustively (scripts/explore): explore and its siblings.
"""
