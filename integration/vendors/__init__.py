"""Our requests beside those of the vendors' own clients.

Each operation is carried out twice, by the vendor's client and by our store, against one server
that records what arrives. What differs is either in the table of :mod:`vendors.accepted`, with the
reason, or a mistake.
"""
