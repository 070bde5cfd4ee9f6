"""The two programs that measure a network link. They run on the hosts at its ends, on python3
alone: any version from 3.6 on, and no hetplan.

The sink prints `port` and the number of its port, answers every byte of a round of single bytes,
and then reads until the source ends. It gives up by itself where no source comes.
"""

PING_PONGS = 50

SINK = f"""\
import socket
server = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
if socket.has_ipv6:
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.bind(("", 0))
server.listen(1)
server.settimeout(15)
print("port", server.getsockname()[1], flush=True)
link, _ = server.accept()
link.settimeout(15)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range({PING_PONGS}):
    link.sendall(link.recv(1))
room = bytearray(2**20)
while link.recv_into(room):
    pass
link.sendall(b"!")
"""

# Behind a line that gives ADDRESS and PORT. It prints `network`, Gbit/s and microseconds.
SOURCE = f"""\
import socket, time
link = socket.create_connection((ADDRESS, PORT), timeout=10)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
rounds = []
for _ in range({PING_PONGS}):
    begun = time.perf_counter()
    link.sendall(b".")
    link.recv(1)
    rounds.append(time.perf_counter() - begun)
block, sent, begun = bytes(2**20), 0, time.perf_counter()
while time.perf_counter() - begun < 1.5:
    link.sendall(block)
    sent += len(block)
link.shutdown(socket.SHUT_WR)
link.recv(1)
seconds = time.perf_counter() - begun
print("network", sent * 8e-9 / seconds, sorted(rounds)[len(rounds) // 2] / 2 * 1e6)
"""
