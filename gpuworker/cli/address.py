"""Argument types of what is listened on, and who can reach it."""

from __future__ import annotations

import argparse
import ipaddress

from gpuworker.cli.numbers import integer


def host(text: str) -> str:
    """The argument type of an address to listen on. An empty one would be every address of the machine, where a variable is not set."""
    if not text:
        raise argparse.ArgumentTypeError("give an address, such as 127.0.0.1; 0.0.0.0 is every one of this machine")
    return text


def port(text: str) -> int:
    """An argument type: a TCP port; 0 is any free one."""
    return integer(text, 0, 65535)


def host_and_port(text: str) -> tuple[str, int]:
    """An argument type: "9400", "0.0.0.0:9400" or "[::1]:9400"."""
    host, _, number = text.rpartition(":")
    if not (number.isascii() and number.isdigit() and int(number) <= 65535):
        raise argparse.ArgumentTypeError(f"{text}: give a port from 0 to 65535, with a host before it if you like: 127.0.0.1:9400")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(number)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
