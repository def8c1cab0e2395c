"""Connections of producers by their names, and how those end that are turned away."""

import socket

import pytest

from kmq.ingress import connection as farewell
from kmq.ingress.connection import Connection, ConnectionTable, Farewells
from kmq.links.fifo import Sender


@pytest.fixture
def connect():
    sockets = []

    def connected():
        near, far = socket.socketpair()
        sockets.extend((near, far))
        return near, Connection(far, "test")

    yield connected
    for sock in sockets:
        sock.close()


def test_a_connection_is_found_by_each_of_its_names_until_it_is_removed(connect):
    table = ConnectionTable()
    connection = connect()[1]
    table.add(connection)
    fd = connection.sock.fileno()
    table.give_name(connection, Sender(b"1.1"), b"me")
    assert (table.at(fd), table.of_sender(b"1.1"), list(table)) == (connection, connection, [connection])
    table.remove(connection)
    assert (table.at(fd), table.of_sender(b"1.1"), len(table)) == (None, None, 0)
    assert table.take_producer(b"me") is None


def test_a_producer_name_belongs_to_the_connection_that_got_it_last(connect):
    table = ConnectionTable()
    older, newer = connect()[1], connect()[1]
    for number, connection in enumerate((older, newer), start=1):
        table.add(connection)
        assert table.take_producer(b"me") is (None if connection is older else older)
        table.give_name(connection, Sender(b"1.%d" % number), b"me")
    table.remove(older)  # must not take the name from the newer connection
    assert table.take_producer(b"me") is newer


def test_what_all_connections_are_owed_is_counted(connect):
    table = ConnectionTable()
    for number, (taken, answered) in enumerate(((5, 2), (3, 3)), start=1):
        connection = connect()[1]
        table.add(connection)
        table.give_name(connection, Sender(b"1.%d" % number), b"")
        connection.replies.taken, connection.replies.answered = taken, answered
    assert table.unanswered == 3 and table.owes_replies
    table.of_sender(b"1.1").replies.answered = 5
    assert table.unanswered == 0 and not table.owes_replies
    table.of_sender(b"1.2").replies.ask()
    assert table.owes_replies


def test_a_refused_connection_stays_open_for_one_sweep_and_too_many_of_them_do_not(connect, monkeypatch):
    monkeypatch.setattr(farewell, "_MOST_OPEN", 1)
    farewells = Farewells()
    (kept, first), (closed, second) = connect(), connect()
    farewells.refuse(first.sock, b"!err 0 connections too many\n")
    farewells.refuse(second.sock, b"!err 0 connections too many\n")
    assert kept.recv(100) == closed.recv(100) == b"!err 0 connections too many\n"
    assert closed.recv(100) == b"" and first.sock.fileno() >= 0
    farewells.sweep()
    assert first.sock.fileno() >= 0
    farewells.sweep()
    assert first.sock.fileno() < 0 and kept.recv(100) == b""
