"""A module that opens a socket when imported."""

import socket

open_socket = socket.socket()
