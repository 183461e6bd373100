"""The HTTP address in front of the engines: it asks a prefill engine, then a decode engine, and passes the answer on.

A client sees one OpenAI-compatible server. Bodies and streams pass through as they are; what the proxy adds is the
word to both engines which transfer joins them. HTTP is h11 on trio's streams, on both sides, because the proxy must
see a client leave while it waits for an engine, must pass every byte on as it comes, and must refuse what could be
read in two ways.
"""
