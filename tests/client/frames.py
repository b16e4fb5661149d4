"""What a relay's frames say in clear: whose stream, which kind, and how long; what they carry is encrypted."""

# Field numbers of the schema.
VERSION, STREAM, ACK, ACK_BITS = 1, 2, 3, 4
BODIES = {5: "data", 6: "ack", 7: "resume", 8: "reset", 9: "heartbeat", 10: "handshake"}
SEQ, RECORD, HANDSHAKE = 1, 4, 1


def read(payload):
    """The frame of a binary message: `stream`, `ack`, `body`, and of records `seq`; `length` is that of what is encrypted."""
    fields = parse(payload)
    if fields.get(VERSION) != 1 or STREAM not in fields:
        raise ValueError(f"no relay frame: {payload[:80]!r}")
    frame = {"stream": fields[STREAM].decode(), "ack": fields.get(ACK, 0)}
    for number, body in BODIES.items():
        if number in fields:
            inner = parse(fields[number])
            encrypted = {"data": inner.get(RECORD), "handshake": inner.get(HANDSHAKE)}.get(body)
            frame |= {"body": body, "length": len(encrypted or b"")}
            frame |= {"seq": inner.get(SEQ, 0)} if body == "data" else {}
    return frame


def parse(message):
    """The fields of a protobuf message: numbers, and bytes."""
    fields, at = {}, 0
    while at < len(message):
        tag, at = number(message, at)
        if tag & 7 == 0:
            fields[tag >> 3], at = number(message, at)
        elif tag & 7 == 2:
            length, at = number(message, at)
            fields[tag >> 3], at = message[at : at + length], at + length
            if at > len(message):
                raise ValueError(f"a field of {length} bytes in {len(message)}")
        else:
            raise ValueError(f"a field of type {tag & 7}")
    return fields


def number(message, at):
    value, shift = 0, 0
    while at < len(message) and shift < 64:
        value |= (message[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if not message[at - 1] & 128:
            return value, at
    raise ValueError("a number that does not end")
