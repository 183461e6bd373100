"""The demo: a real model's KV cache moves from two prefill engines to a decode engine through kvpd's daemons.

Every part is a process of its own. `main` conducts, `children` starts and watches the processes, `engines` and
`proxy` are what those processes run, and `words` is all that is said between them and the conductor.
"""
