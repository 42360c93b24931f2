"""Run in new namespaces: starts the loopback interface, names the machine, uses a file as
/etc/hosts, and becomes another program.

python own_network.py HOSTS COMMAND...; HOSTS may be empty.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    hosts, *command = sys.argv[1:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as request:
        fcntl.ioctl(request, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    # The address of the old name cannot be reached from here.
    socket.sethostname("localhost")
    if hosts:
        subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
