/* The inner loops of the hot path, compiled.
 *
 * Each function handles the regular cases and stops at anything unusual. The Python code beside each use
 * handles the rest, so no rule and no error text is written twice. docs/architecture.md tells what they gain.
 * NSPARQ_NO_EXTENSIONS=1 leaves them out.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#ifdef __linux__
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __has_include
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif
#endif
/* Older systems do not know all of what we use of it. */
#if defined(SYS_io_uring_setup) && defined(IORING_SETUP_DEFER_TASKRUN)
#define HAVE_RING 1
#endif

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif
#define FRAME_OVERHEAD 34
#define MESSAGE 2
#define MESSAGE_WITH_HEADERS 3
#define FIN_WIDTH 21
#define BATCH_HEADER 48
#define MAX_BLOCK 65535
#define FEW_HEADERS 16
#define MAX_NUMBER 21
#define KNOWN_NAMES 61
#define KNOWN_VALUE 32
#define READ_AT_ONCE 64
#define READ_BYTES 4096
#define SEND_AT_ONCE 64

static inline uint32_t
read_u32(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static inline uint64_t
read_u64(const unsigned char *p)
{
    return (uint64_t)read_u32(p) << 32 | read_u32(p + 4);
}

static inline unsigned char *
put_u32(unsigned char *p, uint32_t v)
{
    p[0] = v >> 24;
    p[1] = v >> 16;
    p[2] = v >> 8;
    p[3] = v;
    return p + 4;
}

static inline unsigned char *
put_u64(unsigned char *p, uint64_t v)
{
    return put_u32(put_u32(p, (uint32_t)(v >> 32)), (uint32_t)v);
}

/* Little endian, as on disk. */
static inline uint32_t
get_u32(const unsigned char *p)
{
    return (uint32_t)p[3] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[1] << 8 | (uint32_t)p[0];
}

static inline uint64_t
get_u64(const unsigned char *p)
{
    return (uint64_t)get_u32(p + 4) << 32 | get_u32(p);
}

/* Copy the sizes and the bodies of size-prefixed messages to two places, and move both forward. Gives the
 * position behind the messages. */
static inline const unsigned char *
unpack_messages(const unsigned char *from, Py_ssize_t count, char **length, char **body)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t size = read_u32(from);
        memcpy(*length, &size, 4);
        memcpy(*body, from + 4, size);
        *length += 4;
        *body += size;
        from += 4 + size;
    }
    return from;
}

PyDoc_STRVAR(pack_messages_doc,
"pack_messages(buffer, position, count, max_size) -> (lengths, data, position)\n\n"
"Pack the size-prefixed messages in `buffer` from `position` on, up to `count` of them: their sizes as native\n"
"32-bit numbers, their bodies end to end. Stops before a message that is incomplete or not of an allowed\n"
"size, and gives the position behind the last one taken.");

static PyObject *
pack_messages(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "pack_messages(bytes, int, int, int)");
        return NULL;
    }
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    Py_ssize_t available = PyBytes_GET_SIZE(args[0]);
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (start == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t most = PyLong_AsSsize_t(args[2]);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    long long max_size = PyLong_AsLongLong(args[3]);
    if (max_size == -1 && PyErr_Occurred())
        return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_ValueError, "position is negative");
        return NULL;
    }
    Py_ssize_t position = start, count = 0;
    while (count < most && available - position >= 4) {
        long long size = read_u32(data + position);
        if (size == 0 || size > max_size || size > INT32_MAX || available - position - 4 < size)
            break;
        position += 4 + (Py_ssize_t)size;
        count++;
    }
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 4 * count);
    PyObject *bodies = PyBytes_FromStringAndSize(NULL, position - start - 4 * count);
    if (lengths == NULL || bodies == NULL) {
        Py_XDECREF(lengths);
        Py_XDECREF(bodies);
        return NULL;
    }
    char *length = PyBytes_AS_STRING(lengths), *body = PyBytes_AS_STRING(bodies);
    unpack_messages(data + start, count, &length, &body);
    return Py_BuildValue("NNn", lengths, bodies, position);
}

/* The size of the message, if these bytes are that line and one size-prefixed message of an allowed size. */
static inline Py_ssize_t
lone_publish(const char *data, Py_ssize_t available, const char *line, Py_ssize_t width, long long max_size)
{
    Py_ssize_t size = available - width - 4;
    if (size <= 0 || size > max_size || size > INT32_MAX || memcmp(data, line, (size_t)width) != 0 ||
        read_u32((const unsigned char *)data + width) != (uint32_t)size)
        return -1;
    return size;
}

PyDoc_STRVAR(take_publishes_doc,
"take_publishes(buffer, position, line, is_multi, max_size, max_body_size) -> (counts, lengths, data, position)\n\n"
"The messages of the PUBs, or MPUBs, that follow each other from `position` on, each with the same line before\n"
"it: how many messages each command has, their sizes as native 32-bit numbers, and the bodies end to end.\n"
"Stops before a command that is incomplete or not valid.");

/* The size of an MPUB's messages behind its two numbers, and their count; -1 if the MPUB is not valid. */
static Py_ssize_t
check_messages(const unsigned char *p, Py_ssize_t available, long long max_size, long long max_body, Py_ssize_t *count)
{
    if (available < 8)
        return -1;
    uint32_t size = read_u32(p), wanted = read_u32(p + 4);
    if (size <= 4 || size > max_body || available - 4 < size || wanted == 0 || wanted > size / 4)
        return -1;
    const unsigned char *end = p + 4 + size;
    p += 8;
    for (uint32_t i = 0; i < wanted; i++) {
        if (end - p < 4)
            return -1;
        uint32_t length = read_u32(p);
        if (length == 0 || length > max_size || end - p - 4 < length)
            return -1;
        p += 4 + length;
    }
    *count = wanted;
    return p == end ? (Py_ssize_t)size - 4 : -1;
}

static PyObject *
take_publishes(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 6 || !PyBytes_Check(args[0]) || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "take_publishes(bytes, int, bytes, bool, int, int)");
        return NULL;
    }
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    Py_ssize_t available = PyBytes_GET_SIZE(args[0]);
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (start == -1 && PyErr_Occurred())
        return NULL;
    const char *line = PyBytes_AS_STRING(args[2]);
    Py_ssize_t width = PyBytes_GET_SIZE(args[2]);
    int is_multi = PyObject_IsTrue(args[3]);
    if (is_multi < 0)
        return NULL;
    long long max_size = PyLong_AsLongLong(args[4]);
    if (max_size == -1 && PyErr_Occurred())
        return NULL;
    long long max_body = PyLong_AsLongLong(args[5]);
    if (max_body == -1 && PyErr_Occurred())
        return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_ValueError, "position is negative");
        return NULL;
    }
    /* The first pass counts, the second one copies. */
    Py_ssize_t position = start, commands = 0, messages = 0, bytes = 0;
    while (available - position > width + 4 && memcmp(data + position, line, (size_t)width) == 0) {
        const unsigned char *p = data + position + width;
        Py_ssize_t left = available - position - width, count = 1, size = read_u32(p);
        if (is_multi)
            size = check_messages(p, left, max_size, max_body, &count);
        else if (size == 0 || size > max_size || left - 4 < size)
            break;
        if (size < 0)
            break;
        position += width + (is_multi ? 8 : 4) + size;
        bytes += is_multi ? size - 4 * count : size;
        messages += count;
        commands++;
    }
    PyObject *counts = PyList_New(commands);
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 4 * messages);
    PyObject *bodies = PyBytes_FromStringAndSize(NULL, bytes);
    if (counts == NULL || lengths == NULL || bodies == NULL)
        goto failed;
    char *length = PyBytes_AS_STRING(lengths), *body = PyBytes_AS_STRING(bodies);
    const unsigned char *from = data + start;
    for (Py_ssize_t i = 0; i < commands; i++) {
        from += width;
        uint32_t count = is_multi ? read_u32(from + 4) : 1;
        PyObject *number = PyLong_FromUnsignedLong(count);
        if (number == NULL)
            goto failed;
        PyList_SET_ITEM(counts, i, number);
        from = unpack_messages(from + (is_multi ? 8 : 0), count, &length, &body);
    }
    return Py_BuildValue("NNNn", counts, lengths, bodies, position);
failed:
    Py_XDECREF(counts);
    Py_XDECREF(lengths);
    Py_XDECREF(bodies);
    return NULL;
}

PyDoc_STRVAR(encode_mpub_doc,
"encode_mpub(line, bodies) -> command or None\n\n"
"An MPUB of a list or tuple of messages. None unless all of them are bytes, and none is empty.");

static PyObject *
encode_mpub(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "encode_mpub(bytes, list or tuple)");
        return NULL;
    }
    if (!PyList_CheckExact(args[1]) && !PyTuple_CheckExact(args[1]))
        Py_RETURN_NONE;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(args[1]);
    PyObject **bodies = PySequence_Fast_ITEMS(args[1]);
    Py_ssize_t width = PyBytes_GET_SIZE(args[0]), total = 4 + 4 * count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyBytes_CheckExact(bodies[i]) || PyBytes_GET_SIZE(bodies[i]) == 0)
            Py_RETURN_NONE;
        total += PyBytes_GET_SIZE(bodies[i]);
    }
    if (count == 0 || total > INT32_MAX)
        Py_RETURN_NONE;
    PyObject *command = PyBytes_FromStringAndSize(NULL, width + 1 + 4 + total);
    if (command == NULL)
        return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(command);
    memcpy(out, PyBytes_AS_STRING(args[0]), (size_t)width);
    out[width] = '\n';
    out = put_u32(out + width + 1, (uint32_t)total);
    out = put_u32(out, (uint32_t)count);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t size = PyBytes_GET_SIZE(bodies[i]);
        out = put_u32(out, (uint32_t)size);
        memcpy(out, PyBytes_AS_STRING(bodies[i]), (size_t)size);
        out += size;
    }
    return command;
}

PyDoc_STRVAR(split_headers_doc,
"split_headers(lengths, data) -> (lengths, bodies, block_lengths, blocks, has_numbers)\n\n"
"Messages that each begin with the size of a header block and the block, as native 32-bit sizes and end to end:\n"
"their bodies and their blocks in the same form, and whether a message has the header nsq-producer. Stops before\n"
"a message that breaks a rule.");

static const char PRODUCER[] = "nsq-producer";

static unsigned char NAME_CHARACTERS[256];

static void
init_name_characters(void)
{
    for (const char *c = "abcdefghijklmnopqrstuvwxyz0123456789-_."; *c; c++)
        NAME_CHARACTERS[(unsigned char)*c] = 1;
}

static inline int
is_ascii(const unsigned char *p, Py_ssize_t size)
{
    uint64_t word, seen = 0;
    Py_ssize_t i = 0;
    for (; i + 8 <= size; i += 8) {
        memcpy(&word, p + i, 8);
        seen |= word;
    }
    if (size >= 8) {
        /* The rest, together with bytes that were seen. */
        memcpy(&word, p + size - 8, 8);
        seen |= word;
    }
    else
        for (; i < size; i++)
            seen |= p[i];
    return (seen & 0x8080808080808080u) == 0;
}

/* 1 for UTF-8, 0 for anything else, -1 with an exception. */
static int
is_utf8(const unsigned char *p, Py_ssize_t size)
{
    if (is_ascii(p, size))
        return 1;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)p, size, "strict");
    if (text != NULL) {
        Py_DECREF(text);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        return -1;
    PyErr_Clear();
    return 0;
}

/* Whether the names of a block are all different: 1, 0, or -1 with an exception. The block is well formed. */
static int
are_names_different(const unsigned char *p, const unsigned char *end, Py_ssize_t count)
{
    const unsigned char *names[FEW_HEADERS];
    PyObject *seen = NULL;
    int result = 1;
    if (count > FEW_HEADERS && (seen = PySet_New(NULL)) == NULL)
        return -1;
    for (Py_ssize_t known = 0; p < end && result == 1; known++) {
        Py_ssize_t size = p[0];
        if (seen == NULL) {
            for (Py_ssize_t i = 0; i < known; i++)
                if (memcmp(names[i], p, (size_t)size + 1) == 0)
                    result = 0;
            names[known] = p;
        }
        else {
            PyObject *name = PyBytes_FromStringAndSize((const char *)p + 1, size);
            int found = name == NULL ? -1 : PySet_Contains(seen, name);
            if (found != 0)
                result = found < 0 ? -1 : 0;
            else if (PySet_Add(seen, name))
                result = -1;
            Py_XDECREF(name);
        }
        p += 1 + size;
        p += 2 + ((Py_ssize_t)p[0] << 8 | p[1]);
    }
    Py_XDECREF(seen);
    return result;
}

/* Whether these bytes are a header block: 1, 0, or -1 with an exception. nsparq.headers has the rules. `like` is
 * NULL, or a block that was checked: messages of a publish mostly have the same names, which need no other check.
 * Sets `has_numbers` if a name that is new is that of a producer. */
static int
check_block(const unsigned char *start, Py_ssize_t size, const unsigned char *like, Py_ssize_t like_size,
            int *has_numbers)
{
    const unsigned char *p = start, *end = start + size, *like_end = like + like_size;
    Py_ssize_t count = 0;
    for (; p < end; count++) {
        Py_ssize_t name = *p++;
        if (name == 0 || end - p < name + 2)
            return 0;
        if (like != NULL && like < like_end && like[0] == name && memcmp(like + 1, p, (size_t)name) == 0) {
            like += 1 + name;
            like += 2 + ((Py_ssize_t)like[0] << 8 | like[1]);
        }
        else {
            unsigned char is_name = 1;
            for (Py_ssize_t i = 0; i < name; i++)
                is_name &= NAME_CHARACTERS[p[i]];
            if (!is_name)
                return 0;
            if (name == sizeof PRODUCER - 1 && memcmp(p, PRODUCER, sizeof PRODUCER - 1) == 0)
                *has_numbers = 1;
            like = NULL;
        }
        p += name;
        Py_ssize_t value = (Py_ssize_t)p[0] << 8 | p[1];
        p += 2;
        if (end - p < value)
            return 0;
        int is_text = is_utf8(p, value);
        if (is_text != 1)
            return is_text;
        p += value;
    }
    return count > 1 && like == NULL ? are_names_different(start, end, count) : 1;
}

static PyObject *
split_headers(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer lengths = {0};
    PyObject *pieces[4] = {NULL, NULL, NULL, NULL}, *result = NULL;
    if (nargs != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "split_headers(buffer, bytes)");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &lengths, PyBUF_SIMPLE))
        return NULL;
    const uint32_t *sizes = lengths.buf;
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[1]), *p = data;
    const unsigned char *end = data + PyBytes_GET_SIZE(args[1]);
    Py_ssize_t most = lengths.len / 4, count = 0, bytes_of_blocks = 0, bytes_of_bodies = 0, like_size = 0;
    const unsigned char *like = NULL;
    int has_numbers = 0;
    for (; count < most; count++) {
        Py_ssize_t size = sizes[count];
        if (size > end - p) {
            PyErr_SetString(PyExc_ValueError, "lengths do not add up");
            goto done;
        }
        uint32_t block = size < 4 ? 0 : read_u32(p);
        /* A body has at least one byte. */
        if (size < 4 || block > MAX_BLOCK || size - 4 <= (Py_ssize_t)block)
            break;
        int is_valid = check_block(p + 4, block, like, like_size, &has_numbers);
        if (is_valid < 0)
            goto done;
        if (!is_valid)
            break;
        like = p + 4;
        like_size = block;
        bytes_of_blocks += block;
        bytes_of_bodies += size - 4 - block;
        p += size;
    }
    Py_ssize_t wanted[4] = {4 * count, bytes_of_bodies, 4 * count, bytes_of_blocks};
    for (int i = 0; i < 4; i++)
        if ((pieces[i] = PyBytes_FromStringAndSize(NULL, wanted[i])) == NULL)
            goto done;
    char *length = PyBytes_AS_STRING(pieces[0]), *body = PyBytes_AS_STRING(pieces[1]);
    char *block_length = PyBytes_AS_STRING(pieces[2]), *block = PyBytes_AS_STRING(pieces[3]);
    p = data;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t block_size = read_u32(p), body_size = sizes[i] - 4 - block_size;
        memcpy(length + 4 * i, &body_size, 4);
        memcpy(block_length + 4 * i, &block_size, 4);
        memcpy(block, p + 4, block_size);
        memcpy(body, p + 4 + block_size, body_size);
        block += block_size;
        body += body_size;
        p += sizes[i];
    }
    result = PyTuple_Pack(5, pieces[0], pieces[1], pieces[2], pieces[3], has_numbers ? Py_True : Py_False);
done:
    for (int i = 0; i < 4; i++)
        Py_XDECREF(pieces[i]);
    PyBuffer_Release(&lengths);
    return result;
}

/* Whether an object is a name for a header. */
static int
is_header_name(PyObject *name)
{
    if (!PyUnicode_CheckExact(name) || !PyUnicode_IS_COMPACT_ASCII(name))
        return 0;
    const unsigned char *text = PyUnicode_1BYTE_DATA(name);
    Py_ssize_t width = PyUnicode_GET_LENGTH(name);
    if (width < 1 || width > 255)
        return 0;
    unsigned char is_name = 1;
    for (Py_ssize_t i = 0; i < width; i++)
        is_name &= NAME_CHARACTERS[text[i]];
    return is_name;
}

/* Size of the block of a message's headers; 0 if there are none, -1 for anything unusual: the Python code then
 * encodes it, or says what is wrong. Names in lower case are different, because the keys of a dict are. `known`
 * has FEW_HEADERS names that were checked, by place: messages of a publish mostly have the same. With it, a name
 * that begins with nsq- is unusual: the Python code knows which of these a producer leaves out. */
static Py_ssize_t
block_size(PyObject *headers, PyObject **known)
{
    PyObject *name, *value;
    Py_ssize_t position = 0, total = 0;
    if (headers == Py_None)
        return 0;
    if (!PyDict_CheckExact(headers))
        return -1;
    for (Py_ssize_t place = 0; PyDict_Next(headers, &position, &name, &value); place++) {
        Py_ssize_t size;
        if (known == NULL || place >= FEW_HEADERS || known[place] != name) {
            if (!is_header_name(name))
                return -1;
            if (known != NULL && PyUnicode_GET_LENGTH(name) > 4 && memcmp(PyUnicode_1BYTE_DATA(name), "nsq-", 4) == 0)
                return -1;
            if (known != NULL && place < FEW_HEADERS)
                known[place] = name;
        }
        if (!PyUnicode_CheckExact(value))
            return -1;
        if (PyUnicode_AsUTF8AndSize(value, &size) == NULL) {
            PyErr_Clear();
            return -1;
        }
        total += 3 + PyUnicode_GET_LENGTH(name) + size;
        if (total > MAX_BLOCK)
            return -1;
    }
    return total;
}

/* Write the block of headers for which block_size() is not negative. */
static unsigned char *
put_block(unsigned char *out, PyObject *headers)
{
    PyObject *name, *value;
    Py_ssize_t position = 0, size;
    while (headers != Py_None && PyDict_Next(headers, &position, &name, &value)) {
        Py_ssize_t width = PyUnicode_GET_LENGTH(name);
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        *out++ = (unsigned char)width;
        memcpy(out, PyUnicode_1BYTE_DATA(name), (size_t)width);
        out += width;
        *out++ = (unsigned char)(size >> 8);
        *out++ = (unsigned char)size;
        memcpy(out, text, (size_t)size);
        out += size;
    }
    return out;
}

PyDoc_STRVAR(encode_headers_doc,
"encode_headers(headers) -> block or None\n\n"
"The block of a dict of headers. None if a rule is broken, or a name has capital letters.");

static PyObject *
encode_headers(PyObject *module, PyObject *headers)
{
    Py_ssize_t size = headers == Py_None ? -1 : block_size(headers, NULL);
    if (size < 0)
        Py_RETURN_NONE;
    PyObject *block = PyBytes_FromStringAndSize(NULL, size);
    if (block != NULL)
        put_block((unsigned char *)PyBytes_AS_STRING(block), headers);
    return block;
}

/* Headers that were seen lately. Most messages have the same few names, many of them with the same value: one text for
 * all saves checking it, making it and its hash. */
struct known_header {
    PyObject *name, *value;
};

/* The place of the header with this name. NULL, without an exception, if it is no name. */
static struct known_header *
known_header(const unsigned char *name, Py_ssize_t width)
{
    static struct known_header known[KNOWN_NAMES];
    struct known_header *place = &known[(width + 5 * name[0] + 3 * name[width - 1]) % KNOWN_NAMES];
    if (place->name == NULL || PyUnicode_GET_LENGTH(place->name) != width ||
        memcmp(PyUnicode_1BYTE_DATA(place->name), name, (size_t)width) != 0) {
        for (Py_ssize_t i = 0; i < width; i++)
            if (!NAME_CHARACTERS[name[i]])
                return NULL;
        PyObject *made = PyUnicode_DecodeASCII((const char *)name, width, "strict");
        if (made == NULL)
            return NULL;
        /* Interned, it is the object that a program asks for: no texts are compared. Only the first names are, because
         * some versions of Python keep an interned text for ever. */
        if (place->name == NULL)
            PyUnicode_InternInPlace(&made);
        Py_XSETREF(place->name, made);
    }
    return place;
}

/* A value as a text. NULL, with an exception, if it is none. A short one is kept in `known` for the next message; a
 * longer one is probably an id, which does not come again. */
static PyObject *
header_value(const unsigned char *value, Py_ssize_t size, PyObject **known)
{
    if (!is_ascii(value, size))
        return PyUnicode_DecodeUTF8((const char *)value, size, "strict");
    if (size <= KNOWN_VALUE && *known != NULL && PyUnicode_GET_LENGTH(*known) == size &&
        memcmp(PyUnicode_1BYTE_DATA(*known), value, (size_t)size) == 0)
        return Py_NewRef(*known);
    PyObject *text = PyUnicode_New(size, 127);
    if (text == NULL)
        return NULL;
    memcpy(PyUnicode_1BYTE_DATA(text), value, (size_t)size);
    if (size <= KNOWN_VALUE)
        Py_XSETREF(*known, Py_NewRef(text));
    return text;
}

PyDoc_STRVAR(decode_headers_doc,
"decode_headers(block) -> dict or None\n\n"
"The headers of a block of bytes. None if a rule is broken.");

static PyObject *
decode_headers(PyObject *module, PyObject *block)
{
    /* Messages that share a block, see new_block(), get copies from its third decoding on. */
    static PyObject *last, *last_headers;
    if (block == last && last_headers != NULL)
        return PyDict_Copy(last_headers);
    if (!PyBytes_CheckExact(block))
        Py_RETURN_NONE;
    const unsigned char *p = (const unsigned char *)PyBytes_AS_STRING(block), *end = p + PyBytes_GET_SIZE(block);
    PyObject *headers = PyDict_New();
    Py_ssize_t count = 0;
    for (; headers != NULL && p < end; count++) {
        Py_ssize_t width = *p++, size = 0;
        struct known_header *place = NULL;
        PyObject *value = NULL;
        if (width > 0 && end - p >= width + 2) {
            size = (Py_ssize_t)p[width] << 8 | p[width + 1];
            if (end - p >= width + 2 + size && (place = known_header(p, width)) != NULL)
                value = header_value(p + width + 2, size, &place->value);
        }
        if (value == NULL || PyDict_SetItem(headers, place->name, value))
            Py_CLEAR(headers);
        Py_XDECREF(value);
        p += width + 2 + size;
    }
    /* A name that occurs twice is in the dict once. */
    if (headers != NULL && PyDict_GET_SIZE(headers) == count) {
        if (block != last) {
            Py_CLEAR(last_headers);
            Py_XSETREF(last, Py_NewRef(block));
            return headers;
        }
        PyObject *copy = PyDict_Copy(headers);
        if (copy == NULL)
            Py_CLEAR(headers);
        else if (block == last)
            Py_XSETREF(last_headers, copy);
        else /* The copy made the garbage collector run, and a finalizer decoded another block. */
            Py_DECREF(copy);
        return headers;
    }
    Py_XDECREF(headers);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        return NULL;
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(lazy_headers_doc,
"lazy_headers(slot, decode) -> descriptor\n\n"
"An attribute of the class that has the slot: a block of bytes in the slot is first replaced by its headers. `decode`\n"
"gets a block that breaks a rule.");

struct lazy_headers {
    PyGetSetDef definition;
    Py_ssize_t offset;
    PyObject *decode;
};

static PyObject *
get_lazy_headers(PyObject *self, void *closure)
{
    struct lazy_headers *lazy = closure;
    PyObject **place = (PyObject **)((char *)self + lazy->offset);
    PyObject *headers = Py_XNewRef(*place), *found;
    if (headers == NULL)
        PyErr_SetString(PyExc_AttributeError, "headers");
    if (headers == NULL || !PyBytes_CheckExact(headers))
        return headers;
    found = decode_headers(NULL, headers);
    if (found == Py_None)
        Py_SETREF(found, PyObject_CallOneArg(lazy->decode, headers));
    Py_DECREF(headers);
    if (found != NULL)
        Py_XSETREF(*place, Py_NewRef(found));
    return found;
}

static PyObject *
lazy_headers(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !Py_IS_TYPE(args[0], &PyMemberDescr_Type)) {
        PyErr_SetString(PyExc_TypeError, "lazy_headers(slot, function)");
        return NULL;
    }
    /* Kept as long as the class, which is for ever. */
    struct lazy_headers *lazy = PyMem_Malloc(sizeof *lazy);
    if (lazy == NULL)
        return PyErr_NoMemory();
    lazy->definition = (PyGetSetDef){.name = "headers", .get = get_lazy_headers, .closure = lazy};
    lazy->offset = ((PyMemberDescrObject *)args[0])->d_member->offset;
    lazy->decode = Py_NewRef(args[1]);
    return PyDescr_NewGetSet(PyDescr_TYPE(args[0]), &lazy->definition);
}

static int
count_digits(long long number)
{
    int digits = 1;
    for (; number >= 10; number /= 10)
        digits++;
    return digits;
}

PyDoc_STRVAR(encode_with_headers_doc,
"encode_with_headers(line, bodies, headers[, before, first]) -> command or None\n\n"
"A PUB or DPUB of bytes with a dict of headers; or an MPUB of a list or tuple of messages with a dict for all, or a\n"
"list or tuple with a dict or None for each. None for anything else, if a rule is broken, if a name begins with\n"
"nsq-, or if no message has headers. With `before`, each block begins with that, up to the value of a number:\n"
"`first` for the first message. Then `headers` may be None.");

static PyObject *
encode_with_headers(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if ((nargs != 3 && nargs != 5) || !PyBytes_Check(args[0]) || (nargs == 5 && !PyBytes_Check(args[3]))) {
        PyErr_SetString(PyExc_TypeError, "encode_with_headers(bytes, messages, headers[, bytes, int])");
        return NULL;
    }
    Py_ssize_t before = nargs == 5 ? PyBytes_GET_SIZE(args[3]) : 0;
    long long number = nargs == 5 ? PyLong_AsLongLong(args[4]) : 0;
    if (number == -1 && PyErr_Occurred())
        return NULL;
    int is_same = PyDict_CheckExact(args[2]) || (before > 0 && args[2] == Py_None);
    int is_one = PyBytes_CheckExact(args[1]);
    if ((!is_one && !PyList_CheckExact(args[1]) && !PyTuple_CheckExact(args[1]))
        || (!is_same && (is_one || (!PyList_CheckExact(args[2]) && !PyTuple_CheckExact(args[2])))))
        Py_RETURN_NONE;
    Py_ssize_t count = is_one ? 1 : PySequence_Fast_GET_SIZE(args[1]);
    PyObject *const *bodies = is_one ? &args[1] : PySequence_Fast_ITEMS(args[1]);
    PyObject **headers = is_same ? NULL : PySequence_Fast_ITEMS(args[2]);
    if (!is_same && PySequence_Fast_GET_SIZE(args[2]) != count)
        Py_RETURN_NONE;
    Py_ssize_t width = PyBytes_GET_SIZE(args[0]), total = 8 * count, all = 0;
    PyObject *known[FEW_HEADERS] = {NULL};
    Py_ssize_t block = is_same ? block_size(args[2], known) : 0;
    if (number < 0)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyBytes_CheckExact(bodies[i]) || PyBytes_GET_SIZE(bodies[i]) == 0)
            Py_RETURN_NONE;
        if (!is_same)
            block = block_size(headers[i], known);
        if (block < 0 || block > MAX_BLOCK - before - (before ? MAX_NUMBER : 0))
            Py_RETURN_NONE;
        all += block + (before ? before + 2 + count_digits(number + i) : 0);
        total += PyBytes_GET_SIZE(bodies[i]);
    }
    total += all;
    if (all == 0 || total > INT32_MAX - 4)
        Py_RETURN_NONE;
    PyObject *command = PyBytes_FromStringAndSize(NULL, width + 9 + (is_one ? 0 : 8) + total);
    if (command == NULL)
        return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(command);
    memcpy(out, PyBytes_AS_STRING(args[0]), (size_t)width);
    memcpy(out + width, " headers\n", 9);
    out += width + 9;
    if (!is_one)
        out = put_u32(put_u32(out, (uint32_t)(4 + total)), (uint32_t)count);
    const unsigned char *first = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t size = PyBytes_GET_SIZE(bodies[i]);
        unsigned char *start = out + 8;
        out = start;
        if (before) {
            int digits = count_digits(number + i);
            memcpy(out, PyBytes_AS_STRING(args[3]), (size_t)before);
            out += before;
            *out++ = 0;
            *out++ = (unsigned char)digits;
            for (long long rest = number + i, place = digits; place > 0; rest /= 10)
                out[--place] = '0' + (char)(rest % 10);
            out += digits;
        }
        if (is_same && first != NULL) {
            memcpy(out, first, (size_t)block);
            out += block;
        }
        else {
            unsigned char *own = out;
            out = put_block(out, is_same ? args[2] : headers[i]);
            first = own;
        }
        put_u32(start - 4, (uint32_t)(out - start));
        put_u32(start - 8, (uint32_t)(4 + (out - start) + size));
        memcpy(out, PyBytes_AS_STRING(bodies[i]), (size_t)size);
        out += size;
    }
    return command;
}

PyDoc_STRVAR(count_numbers_doc,
"count_numbers(lengths, data, index, start, known) -> (count, first, behind)\n\n"
"The header blocks in `data` have native 32-bit sizes. How many, from number `index` at `start` on, begin with\n"
"`known` and then have a value of at most 18 digits, each number one more than that before; the first of these\n"
"numbers, and the position behind the last of these blocks.");

static PyObject *
count_numbers(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "count_numbers(buffer, bytes, int, int, bytes)");
        return NULL;
    }
    Py_ssize_t index = PyLong_AsSsize_t(args[2]), start = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer lengths;
    if (PyObject_GetBuffer(args[0], &lengths, PyBUF_SIMPLE))
        return NULL;
    const uint32_t *sizes = lengths.buf;
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[1]);
    const char *known = PyBytes_AS_STRING(args[4]);
    Py_ssize_t most = lengths.len / 4, width = PyBytes_GET_SIZE(args[4]), size = PyBytes_GET_SIZE(args[1]);
    long long first = 0, count = 0;
    for (; index >= 0 && start >= 0 && index < most && sizes[index] <= size - start; index++) {
        const unsigned char *p = data + start;
        Py_ssize_t length = sizes[index];
        if (length < width + 2 || memcmp(p, known, (size_t)width) != 0)
            break;
        int digits = p[width + 1], is_number = p[width] == 0 && digits > 0 && digits <= 18;
        if (!is_number || digits > length - width - 2)
            break;
        long long number = 0;
        p += width + 2;
        for (int i = 0; i < digits; i++) {
            is_number &= p[i] >= '0' && p[i] <= '9';
            number = 10 * number + (p[i] - '0');
        }
        if (!is_number || (count > 0 && number != first + count))
            break;
        if (count++ == 0)
            first = number;
        start += length;
    }
    PyBuffer_Release(&lengths);
    return Py_BuildValue("LLn", count, first, start);
}

static const char HEX[] = "0123456789abcdef";

PyDoc_STRVAR(build_frames_doc,
"build_frames(first_id, timestamps_ns, lengths, data[, block_lengths, blocks]) -> (buffer, offsets)\n\n"
"Message frames with attempts 1. `lengths` holds native 32-bit sizes, `data` the bodies end to end;\n"
"`timestamps_ns` is one integer, or a buffer with one native 64-bit integer for each message. The offsets, one\n"
"more than there are messages, are an array.array of type \"q\". With header blocks, a message whose block is not\n"
"empty gets a frame of type 3, with the block in front of the body.");

static PyObject *array_type;

static PyObject *
build_frames(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer lengths = {0}, data = {0}, stamps = {0}, block_lengths = {0}, blocks = {0};
    PyObject *buffer = NULL, *offsets = NULL, *result = NULL;
    int64_t stamp = 0;
    if (nargs != 4 && nargs != 6) {
        PyErr_SetString(PyExc_TypeError, "build_frames(int, int or buffer, buffer, buffer[, buffer, buffer])");
        return NULL;
    }
    uint64_t id = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    if (PyLong_Check(args[1])) {
        stamp = PyLong_AsLongLong(args[1]);
        if (PyErr_Occurred())
            return NULL;
    }
    else if (PyObject_GetBuffer(args[1], &stamps, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(args[2], &lengths, PyBUF_SIMPLE))
        goto done;
    if (PyObject_GetBuffer(args[3], &data, PyBUF_SIMPLE))
        goto done;
    if (nargs == 6 && (PyObject_GetBuffer(args[4], &block_lengths, PyBUF_SIMPLE) ||
                       PyObject_GetBuffer(args[5], &blocks, PyBUF_SIMPLE)))
        goto done;
    Py_ssize_t count = lengths.len / 4;
    const uint32_t *sizes = lengths.buf, *block_sizes = block_lengths.buf;
    Py_ssize_t total = 0, block_total = 0, with_blocks = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        total += sizes[i];
    if (total != data.len || (stamps.obj != NULL && stamps.len != count * 8) ||
        (nargs == 6 && block_lengths.len / 4 != count)) {
        PyErr_SetString(PyExc_ValueError, "lengths do not add up");
        goto done;
    }
    for (Py_ssize_t i = 0; i < count && block_sizes != NULL; i++) {
        block_total += block_sizes[i];
        with_blocks += block_sizes[i] != 0;
    }
    if (block_total != blocks.len) {
        PyErr_SetString(PyExc_ValueError, "lengths do not add up");
        goto done;
    }
    total += block_total + 4 * with_blocks;
    buffer = PyBytes_FromStringAndSize(NULL, total + count * FRAME_OVERHEAD);
    offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 8);
    if (buffer == NULL || offsets == NULL)
        goto done;
    char *offset = PyBytes_AS_STRING(offsets);
    unsigned char *start = (unsigned char *)PyBytes_AS_STRING(buffer), *out = start;
    const unsigned char *body = data.buf, *block = blocks.buf;
    for (Py_ssize_t i = 0; i <= count; i++) {
        int64_t position = out - start;
        memcpy(offset + 8 * i, &position, 8);
        if (i == count)
            break;
        uint32_t size = sizes[i], block_size = block_sizes == NULL ? 0 : block_sizes[i];
        if (stamps.obj != NULL)
            memcpy(&stamp, (const char *)stamps.buf + 8 * i, 8);
        out = put_u32(out, size + FRAME_OVERHEAD - 4 + (block_size ? 4 + block_size : 0));
        out = put_u32(out, block_size ? 3 : 2);
        out = put_u64(out, (uint64_t)stamp);
        *out++ = 0;
        *out++ = 1;
        for (int shift = 60; shift >= 0; shift -= 4)
            *out++ = HEX[(id >> shift) & 15];
        id++;
        if (block_size) {
            out = put_u32(out, block_size);
            memcpy(out, block, block_size);
            out += block_size;
            block += block_size;
        }
        memcpy(out, body, size);
        out += size;
        body += size;
    }
    PyObject *array = PyObject_CallFunction(array_type, "sO", "q", offsets);
    if (array != NULL) {
        result = PyTuple_Pack(2, buffer, array);
        Py_DECREF(array);
    }
done:
    Py_XDECREF(buffer);
    Py_XDECREF(offsets);
    if (stamps.obj != NULL)
        PyBuffer_Release(&stamps);
    if (lengths.obj != NULL)
        PyBuffer_Release(&lengths);
    if (data.obj != NULL)
        PyBuffer_Release(&data);
    if (block_lengths.obj != NULL)
        PyBuffer_Release(&block_lengths);
    if (blocks.obj != NULL)
        PyBuffer_Release(&blocks);
    return result;
}

PyDoc_STRVAR(decode_messages_doc,
"decode_messages(buffer, position, max_size) -> (messages, position)\n\n"
"The message frames in `buffer` from `position` on, each as a tuple of time, attempts, id, body and header block.\n"
"Stops before a frame that is not whole, longer than `max_size` or not a message, and gives its position.");

/* The header block of a message: the object of the message before it if both are the same, as in a batch whose
 * messages all got the same headers. */
static PyObject *
new_block(const char *block, Py_ssize_t size, PyObject *messages)
{
    Py_ssize_t count = PyList_GET_SIZE(messages);
    PyObject *before = count ? PyTuple_GET_ITEM(PyList_GET_ITEM(messages, count - 1), 4) : NULL;
    if (before != NULL && PyBytes_GET_SIZE(before) == size && memcmp(PyBytes_AS_STRING(before), block, (size_t)size) == 0)
        return Py_NewRef(before);
    return PyBytes_FromStringAndSize(block, size);
}

/* The tuple of a message frame. Its header block of `block` bytes and its body have `size` bytes together. `before` is
 * the list of messages before it. */
static PyObject *
new_message(const unsigned char *frame, const char *content, Py_ssize_t block, Py_ssize_t size, PyObject *before)
{
    /* Quicker than Py_BuildValue(), which reads its format each time. */
    PyObject *parts[] = {
        PyLong_FromLongLong((int64_t)read_u64(frame + 8)),
        PyLong_FromLong(frame[16] << 8 | frame[17]),
        PyBytes_FromStringAndSize((const char *)frame + 18, 16),
        PyBytes_FromStringAndSize(content + block, size - block),
        new_block(content, block, before),
    };
    PyObject *message = PyTuple_New(5);
    int failed = message == NULL;
    for (int i = 0; i < 5; i++) {
        failed |= parts[i] == NULL;
        if (message != NULL)
            PyTuple_SET_ITEM(message, i, parts[i]);
        else
            Py_XDECREF(parts[i]);
    }
    if (failed)
        Py_CLEAR(message);
    return message;
}

static PyObject *
decode_messages(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "decode_messages(bytes, int, int)");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(args[1]), max_size = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const char *data = PyBytes_AS_STRING(args[0]);
    Py_ssize_t available = PyBytes_GET_SIZE(args[0]);
    PyObject *messages = PyList_New(0);
    while (messages != NULL && position >= 0 && available - position >= FRAME_OVERHEAD) {
        const unsigned char *frame = (const unsigned char *)data + position;
        Py_ssize_t size = (int32_t)read_u32(frame), kind = read_u32(frame + 4), end = position + 4 + size;
        Py_ssize_t start = position + FRAME_OVERHEAD, block = 0;
        if (end > available || size > max_size)
            break;
        if (kind == MESSAGE_WITH_HEADERS && end - start >= 4) {
            block = (int32_t)read_u32(frame + FRAME_OVERHEAD);
            start += 4;
        }
        else if (kind != MESSAGE)
            break;
        if (block < 0 || block > end - start)
            break;
        PyObject *message = new_message(frame, data + start, block, end - start, messages);
        if (message == NULL || PyList_Append(messages, message))
            Py_CLEAR(messages);
        Py_XDECREF(message);
        position = end;
    }
    return messages == NULL ? NULL : Py_BuildValue("Nn", messages, position);
}

static inline int
hex_digit(unsigned char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return -1;
}

/* Step the hexadecimal text of an id, held in two numbers, to the next id. 0 for the largest id. */
static inline int
step_text(uint64_t *high, uint64_t *low)
{
    uint64_t *half = low;
    int shift = 0;
    while ((*half >> shift & 0xff) == 'f') {
        *half -= (uint64_t)('f' - '0') << shift;
        shift += 8;
        if (shift == 64) {
            if (half == high)
                return 0;
            half = high;
            shift = 0;
        }
    }
    *half += (uint64_t)((*half >> shift & 0xff) == '9' ? 'a' - '9' : 1) << shift;
    return 1;
}

PyDoc_STRVAR(decode_fins_doc,
"decode_fins(buffer, position) -> (spans, position)\n\n"
"The message ids of the plain FIN lines that follow each other from `position` on, as spans of consecutive\n"
"ids (first, behind the last), and the position behind those lines.");

static int
append_span(PyObject *spans, uint64_t first, uint64_t count)
{
    PyObject *from = PyLong_FromUnsignedLongLong(first);
    PyObject *width = PyLong_FromUnsignedLongLong(count);
    /* Added as Python integers: the number behind the largest id does not fit 64 bits. */
    PyObject *to = from != NULL && width != NULL ? PyNumber_Add(from, width) : NULL;
    PyObject *span = to != NULL ? PyTuple_Pack(2, from, to) : NULL;
    int failed = span == NULL || PyList_Append(spans, span);
    Py_XDECREF(from);
    Py_XDECREF(width);
    Py_XDECREF(to);
    Py_XDECREF(span);
    return failed;
}

static PyObject *
decode_fins(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "decode_fins(bytes, int)");
        return NULL;
    }
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    Py_ssize_t available = PyBytes_GET_SIZE(args[0]);
    Py_ssize_t position = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (position < 0) {
        PyErr_SetString(PyExc_ValueError, "position is negative");
        return NULL;
    }
    PyObject *spans = PyList_New(0);
    if (spans == NULL)
        return NULL;
    uint64_t first = 0, count = 0;
    uint64_t high = 0, low = 0;
    int is_following = 0; /* whether high and low hold the text of the next id */
    while (available - position >= FIN_WIDTH) {
        const unsigned char *line = data + position;
        if (memcmp(line, "FIN ", 4) != 0 || line[FIN_WIDTH - 1] != '\n')
            break;
        if (is_following && read_u64(line + 12) == low && read_u64(line + 4) == high) {
            count++;
            position += FIN_WIDTH;
            is_following = step_text(&high, &low);
            continue;
        }
        uint64_t id = 0;
        int digit = 0;
        for (int i = 4; i < FIN_WIDTH - 1 && digit >= 0; i++) {
            digit = hex_digit(line[i]);
            id = id << 4 | (uint64_t)(digit & 15);
        }
        if (digit < 0)
            break;
        if (count > 0 && append_span(spans, first, count)) {
            Py_DECREF(spans);
            return NULL;
        }
        first = id;
        count = 1;
        position += FIN_WIDTH;
        high = read_u64(line + 4);
        low = read_u64(line + 12);
        is_following = step_text(&high, &low);
    }
    if (count > 0 && append_span(spans, first, count)) {
        Py_DECREF(spans);
        return NULL;
    }
    return Py_BuildValue("Nn", spans, position);
}

/* crc32c, the checksum of the log's batches: by the processor's instruction, or by eight tables. */

static uint32_t CRC_TABLE[8][256];

static void
init_crc_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        CRC_TABLE[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            CRC_TABLE[k][i] = CRC_TABLE[k - 1][i] >> 8 ^ CRC_TABLE[0][CRC_TABLE[k - 1][i] & 255];
}

static uint32_t
crc32c_tables(const unsigned char *p, size_t size)
{
    uint32_t crc = 0xffffffffu;
    for (; size >= 8; size -= 8, p += 8) {
        uint32_t low = crc ^ get_u32(p);
        crc = CRC_TABLE[7][low & 255] ^ CRC_TABLE[6][low >> 8 & 255] ^ CRC_TABLE[5][low >> 16 & 255] ^
              CRC_TABLE[4][low >> 24] ^ CRC_TABLE[3][p[4]] ^ CRC_TABLE[2][p[5]] ^ CRC_TABLE[1][p[6]] ^
              CRC_TABLE[0][p[7]];
    }
    for (; size > 0; size--)
        crc = crc >> 8 ^ CRC_TABLE[0][(crc ^ *p++) & 255];
    return ~crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("sse4.2"))) static uint32_t
crc32c_instruction(const unsigned char *p, size_t size)
{
    uint64_t crc = 0xffffffffu;
    for (; size >= 8; size -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    uint32_t rest = (uint32_t)crc;
    for (; size > 0; size--)
        rest = __builtin_ia32_crc32qi(rest, *p++);
    return ~rest;
}
#endif

static uint32_t (*crc32c)(const unsigned char *, size_t) = crc32c_tables;

static inline unsigned char *
put_little(unsigned char *p, uint64_t value, int width)
{
    for (int i = 0; i < width; i++)
        p[i] = (unsigned char)(value >> 8 * i);
    return p + width;
}

PyDoc_STRVAR(encode_singles_doc,
"encode_singles(sequences, timestamps_ns, bodies, blocks, mark) -> (data, sizes)\n\n"
"Batches of one message each, end to end, and their sizes as native 64-bit numbers. Sequence numbers and publish\n"
"times are native 64-bit numbers; `bodies` and `blocks` are lists of bytes, and an empty block means no headers.");

static PyObject *
encode_singles(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyList_CheckExact(args[2]) || !PyList_CheckExact(args[3])) {
        PyErr_SetString(PyExc_TypeError, "encode_singles(buffer, buffer, list, list, int)");
        return NULL;
    }
    unsigned long mark = PyLong_AsUnsignedLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer sequences = {0}, stamps = {0};
    PyObject *data = NULL, *sizes = NULL, *result = NULL;
    if (PyObject_GetBuffer(args[0], &sequences, PyBUF_SIMPLE) || PyObject_GetBuffer(args[1], &stamps, PyBUF_SIMPLE))
        goto done;
    Py_ssize_t count = PyList_GET_SIZE(args[2]), total = 0;
    if (PyList_GET_SIZE(args[3]) != count || sequences.len != 8 * count || stamps.len != 8 * count) {
        PyErr_SetString(PyExc_ValueError, "not as many of each");
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *body = PyList_GET_ITEM(args[2], i), *block = PyList_GET_ITEM(args[3], i);
        if (!PyBytes_CheckExact(body) || !PyBytes_CheckExact(block)) {
            PyErr_SetString(PyExc_TypeError, "bodies and blocks must be bytes");
            goto done;
        }
        Py_ssize_t tail = PyBytes_GET_SIZE(block) ? 4 + PyBytes_GET_SIZE(block) : 0;
        Py_ssize_t size = BATCH_HEADER + 4 + PyBytes_GET_SIZE(body) + tail;
        if (size > UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "a message is too long");
            goto done;
        }
        total += size;
    }
    data = PyBytes_FromStringAndSize(NULL, total);
    sizes = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (data == NULL || sizes == NULL)
        goto done;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(data);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *body = PyList_GET_ITEM(args[2], i), *block = PyList_GET_ITEM(args[3], i);
        size_t length = (size_t)PyBytes_GET_SIZE(body), headers = (size_t)PyBytes_GET_SIZE(block);
        unsigned char *start = out;
        uint64_t sequence, stamp;
        memcpy(&sequence, (const char *)sequences.buf + 8 * i, 8);
        memcpy(&stamp, (const char *)stamps.buf + 8 * i, 8);
        int64_t size = (int64_t)(BATCH_HEADER + 4 + length + (headers ? 4 + headers : 0));
        memcpy(out, headers ? "NQB2" : "NQB1", 4);
        out = put_little(out + 8, (uint64_t)size, 4);
        out = put_little(out, (uint64_t)mark << 16, 4);
        out = put_little(out, sequence, 8);
        out = put_little(out, stamp, 8);
        out = put_little(out, 0, 8);
        out = put_little(out, 1, 4);
        out = put_little(out, length, 4);
        out = put_little(out, length, 4);
        memcpy(out, PyBytes_AS_STRING(body), length);
        out += length;
        if (headers) {
            out = put_little(out, headers, 4);
            memcpy(out, PyBytes_AS_STRING(block), headers);
            out += headers;
        }
        put_little(start + 4, crc32c(start + 8, (size_t)size - 8), 4);
        memcpy(PyBytes_AS_STRING(sizes) + 8 * i, &size, 8);
    }
    result = PyTuple_Pack(2, data, sizes);
done:
    Py_XDECREF(data);
    Py_XDECREF(sizes);
    PyBuffer_Release(&sequences);
    PyBuffer_Release(&stamps);
    return result;
}

PyDoc_STRVAR(unpack_batches_doc,
"unpack_batches(buffer, position, start, end, max_rows, max_bytes, headers)\n"
"    -> (heads, offsets, data, block_offsets, blocks, position)\n\n"
"Batches of a log, from `position` on, that hold messages from `start` to before `end`; whole ones, checked. Of\n"
"each (sequence, publish time, due time, count) as native 64-bit numbers; of all their messages together\n"
"the bodies end to end, and as native 32-bit numbers where each begins and the last one ends. If `headers` is\n"
"not 0 and a batch has headers, the header blocks of all messages in the same form; otherwise two empty strings.\n"
"Stops before a batch that would make it more than `max_rows` messages or `max_bytes` of them, unless it is the\n"
"first; before the first message from `end` on; and before anything that is not a whole and undamaged batch.\n"
"Batches before `start` are passed over unread.");

static int
plausible_batch(const unsigned char *p, Py_ssize_t available)
{
    if (available < BATCH_HEADER || (memcmp(p, "NQB1", 4) != 0 && memcmp(p, "NQB2", 4) != 0))
        return 0;
    uint64_t size = get_u32(p + 8), count = get_u32(p + 40), data = get_u32(p + 44);
    uint64_t bare = BATCH_HEADER + 4 * count + data;
    return count > 0 && (p[3] == '1' ? size == bare : size >= bare + 4 * count) && size <= (uint64_t)available &&
           get_u64(p + 16) <= INT64_MAX - count;
}

/* Bytes of the header blocks of a plausible batch. */
static uint32_t
size_of_blocks(const unsigned char *p)
{
    uint32_t count = get_u32(p + 40);
    return p[3] == '1' ? 0 : get_u32(p + 8) - BATCH_HEADER - 8 * count - get_u32(p + 44);
}

/* Strings behind a table of their lengths, one of the two pairs in a batch. */
struct strings {
    int32_t *offset;
    unsigned char *data;
    uint32_t used;
};

/* Append the strings at `table`, `left` bytes together. 0 if the lengths do not add up. */
static int
append_strings(struct strings *to, const unsigned char *table, uint32_t count, uint32_t left)
{
    uint32_t at = to->used;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t length = get_u32(table + 4 * (size_t)i);
        if (length > left)
            return 0;
        left -= length;
        at += length;
        *++to->offset = (int32_t)at;
    }
    if (left != 0)
        return 0;
    memcpy(to->data + to->used, table + 4 * (size_t)count, at - to->used);
    to->used = at;
    return 1;
}

/* Unpack one batch, its headers only to `blocks` with an offset. 0 if it is damaged. */
static int
unpack_batch(const unsigned char *p, int64_t *head, struct strings *bodies, struct strings *blocks)
{
    uint32_t size = get_u32(p + 8), count = get_u32(p + 40), data = get_u32(p + 44);
    const unsigned char *table = p + BATCH_HEADER, *behind = table + 4 * (size_t)count + data;
    if (crc32c(p + 8, size - 8) != get_u32(p + 4) || !append_strings(bodies, table, count, data))
        return 0;
    if (blocks->offset != NULL && p[3] == '1')
        for (uint32_t i = 0; i < count; i++)
            *++blocks->offset = (int32_t)blocks->used;
    else if (blocks->offset != NULL && !append_strings(blocks, behind, count, size_of_blocks(p)))
        return 0;
    head[0] = (int64_t)get_u64(p + 16);
    head[1] = (int64_t)get_u64(p + 24);
    head[2] = (int64_t)get_u64(p + 32);
    head[3] = count;
    return 1;
}

static PyObject *
unpack_batches(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    long long numbers[6];
    if (nargs != 7) {
        PyErr_SetString(PyExc_TypeError, "unpack_batches(buffer, int, int, int, int, int, int)");
        return NULL;
    }
    for (int i = 0; i < 6; i++) {
        numbers[i] = PyLong_AsLongLong(args[i + 1]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return NULL;
        if (numbers[i] < 0) {
            PyErr_SetString(PyExc_ValueError, "a number is negative");
            return NULL;
        }
    }
    Py_ssize_t position = (Py_ssize_t)numbers[0];
    uint64_t start = (uint64_t)numbers[1], end = (uint64_t)numbers[2];
    uint64_t max_rows = (uint64_t)numbers[3], max_bytes = (uint64_t)numbers[4];
    Py_buffer buffer;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE))
        return NULL;
    const unsigned char *data = buffer.buf;
    while (position < buffer.len && plausible_batch(data + position, buffer.len - position)) {
        const unsigned char *p = data + position;
        if (get_u64(p + 16) + get_u32(p + 40) > start)
            break;
        position += get_u32(p + 8);
    }
    /* Count first. */
    uint64_t batches = 0, rows = 0, bytes = 0, block_bytes = 0;
    Py_ssize_t stop = position;
    while (stop < buffer.len && plausible_batch(data + stop, buffer.len - stop)) {
        const unsigned char *p = data + stop;
        uint64_t count = get_u32(p + 40), size = get_u32(p + 44), blocks = numbers[5] ? size_of_blocks(p) : 0;
        if (get_u64(p + 16) >= end || bytes + size > INT32_MAX || block_bytes + blocks > INT32_MAX ||
            (batches > 0 && (rows + count > max_rows || bytes + size + block_bytes + blocks > max_bytes)))
            break;
        batches++;
        rows += count;
        bytes += size;
        block_bytes += blocks;
        stop += get_u32(p + 8);
    }
    PyObject *heads = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(32 * batches));
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * (rows + 1)));
    PyObject *bodies = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    PyObject *block_offsets = PyBytes_FromStringAndSize(NULL, block_bytes ? (Py_ssize_t)(4 * (rows + 1)) : 0);
    PyObject *blocks = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)block_bytes);
    if (heads == NULL || offsets == NULL || bodies == NULL || block_offsets == NULL || blocks == NULL)
        goto failed;
    int64_t *head = (int64_t *)PyBytes_AS_STRING(heads);
    struct strings body = {(int32_t *)PyBytes_AS_STRING(offsets), (unsigned char *)PyBytes_AS_STRING(bodies), 0};
    struct strings block = {NULL, (unsigned char *)PyBytes_AS_STRING(blocks), 0};
    *body.offset = 0;
    if (block_bytes) {
        block.offset = (int32_t *)PyBytes_AS_STRING(block_offsets);
        *block.offset = 0;
    }
    uint64_t taken = 0, taken_rows = 0;
    Py_BEGIN_ALLOW_THREADS
    while (taken < batches) {
        const unsigned char *p = data + position;
        uint32_t bodies_before = body.used, blocks_before = block.used;
        if (!unpack_batch(p, head + 4 * taken, &body, &block)) {
            body.used = bodies_before;
            block.used = blocks_before;
            break;
        }
        taken++;
        taken_rows += get_u32(p + 40);
        position += get_u32(p + 8);
    }
    Py_END_ALLOW_THREADS
    if (taken < batches &&
        (_PyBytes_Resize(&heads, (Py_ssize_t)(32 * taken)) ||
         _PyBytes_Resize(&offsets, (Py_ssize_t)(4 * (taken_rows + 1))) ||
         _PyBytes_Resize(&bodies, (Py_ssize_t)body.used) ||
         (block_bytes && (_PyBytes_Resize(&block_offsets, (Py_ssize_t)(4 * (taken_rows + 1))) ||
                          _PyBytes_Resize(&blocks, (Py_ssize_t)block.used)))))
        goto failed;
    PyBuffer_Release(&buffer);
    return Py_BuildValue("NNNNNn", heads, offsets, bodies, block_offsets, blocks, position);
failed:
    PyBuffer_Release(&buffer);
    Py_XDECREF(heads);
    Py_XDECREF(offsets);
    Py_XDECREF(bodies);
    Py_XDECREF(block_offsets);
    Py_XDECREF(blocks);
    return NULL;
}

PyDoc_STRVAR(unpack_headers_doc,
"unpack_headers(offsets, blocks) -> (limits, name_offsets, names, value_offsets, values) or None\n\n"
"The headers of messages whose blocks lie end to end in `blocks`; `offsets`, native 32-bit numbers, tell where each\n"
"begins and the last one ends. Gives how many headers come before each message and before the end, and the names\n"
"and the values of all of them: where each begins and the last one ends, as such numbers, and the bytes end to end.\n"
"None if these are not such offsets, or not header blocks.");

#define AT_ONCE 16
#define SHORT_STRING 128

/* Append a string, of which `room` bytes and more can be read and written. A call of memcpy() costs more than it copies
 * of a short string; so these are copied by steps, the last of which may go too far. */
static inline void
append_string(struct strings *to, const unsigned char *from, uint32_t size, Py_ssize_t room)
{
    unsigned char *at = to->data + to->used;
    if (size > SHORT_STRING || room < (Py_ssize_t)size + AT_ONCE)
        memcpy(at, from, size);
    else
        for (uint32_t i = 0; i < size; i += AT_ONCE)
            memcpy(at + i, from + i, AT_ONCE);
    to->used += size;
    *++to->offset = (int32_t)to->used;
}

/* Append the headers of the block from `p` to `end`, behind which there are `room` bytes more. Gives how many, -1 if
 * it is none. No buffer is filled further than `p` has come, so there is as much room in each. */
static inline int32_t
append_headers(struct strings *names, struct strings *values, const unsigned char *p, const unsigned char *end,
               Py_ssize_t room)
{
    int32_t count = 0;
    for (; p < end; count++) {
        Py_ssize_t name = *p++;
        if (end - p < name + 2)
            return -1;
        append_string(names, p, (uint32_t)name, end - p + room);
        p += name;
        Py_ssize_t value = (Py_ssize_t)p[0] << 8 | p[1];
        p += 2;
        if (end - p < value)
            return -1;
        append_string(values, p, (uint32_t)value, end - p + room);
        p += value;
    }
    return count;
}

static PyObject *
unpack_headers(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "unpack_headers(bytes, bytes)");
        return NULL;
    }
    const char *offsets = PyBytes_AS_STRING(args[0]);
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(args[1]);
    Py_ssize_t rows = PyBytes_GET_SIZE(args[0]) / 4 - 1, size = PyBytes_GET_SIZE(args[1]);
    int32_t at = 0, end = 0;
    if (rows >= 0)
        memcpy(&at, offsets, 4);
    if (rows < 0 || at != 0)
        Py_RETURN_NONE;
    /* The most that there may be: a header has at least the three bytes of its sizes. To count first takes longer. */
    PyObject *limits = PyBytes_FromStringAndSize(NULL, 4 * (rows + 1));
    PyObject *name_offsets = PyBytes_FromStringAndSize(NULL, 4 * (size / 3 + 1));
    PyObject *names = PyBytes_FromStringAndSize(NULL, size);
    PyObject *value_offsets = PyBytes_FromStringAndSize(NULL, 4 * (size / 3 + 1));
    PyObject *values = PyBytes_FromStringAndSize(NULL, size);
    PyObject *found = NULL;
    if (limits == NULL || name_offsets == NULL || names == NULL || value_offsets == NULL || values == NULL)
        goto done;
    int32_t *limit = (int32_t *)PyBytes_AS_STRING(limits), headers = 0;
    struct strings name = {(int32_t *)PyBytes_AS_STRING(name_offsets), (unsigned char *)PyBytes_AS_STRING(names), 0};
    struct strings value = {(int32_t *)PyBytes_AS_STRING(value_offsets), (unsigned char *)PyBytes_AS_STRING(values), 0};
    *limit = *name.offset = *value.offset = 0;
    for (Py_ssize_t i = 0; i < rows; i++, at = end) {
        memcpy(&end, offsets + 4 * (i + 1), 4);
        int32_t count = end < at || end > size ? -1 : append_headers(&name, &value, data + at, data + end, size - end);
        if (count < 0) {
            found = Py_NewRef(Py_None);
            goto done;
        }
        *++limit = headers += count;
    }
    if (!_PyBytes_Resize(&name_offsets, 4 * ((Py_ssize_t)headers + 1)) &&
        !_PyBytes_Resize(&names, (Py_ssize_t)name.used) &&
        !_PyBytes_Resize(&value_offsets, 4 * ((Py_ssize_t)headers + 1)) &&
        !_PyBytes_Resize(&values, (Py_ssize_t)value.used))
        found = PyTuple_Pack(5, limits, name_offsets, names, value_offsets, values);
done:
    Py_XDECREF(limits);
    Py_XDECREF(name_offsets);
    Py_XDECREF(names);
    Py_XDECREF(value_offsets);
    Py_XDECREF(values);
    return found;
}

/* A ring of io_uring, to send to many sockets with one system call. After each of many calls the kernel would run a
 * client that the send has woken, before the others have their bytes. */
static const char RING_NAME[] = "nsparq.send_ring";

#ifdef HAVE_RING
struct send_ring {
    int fd;
    unsigned *sq_head, *sq_tail, *cq_head, *cq_tail;
    unsigned sq_mask, cq_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *results;
    void *rings;
    size_t rings_size, entries_size;
};

static void
close_ring(struct send_ring *ring)
{
    if (ring->entries != NULL)
        munmap(ring->entries, ring->entries_size);
    if (ring->rings != NULL)
        munmap(ring->rings, ring->rings_size);
    close(ring->fd);
    PyMem_Free(ring);
}

static void
free_ring(PyObject *capsule)
{
    close_ring(PyCapsule_GetPointer(capsule, RING_NAME));
}

static void *
map_ring(int fd, size_t size, off_t offset)
{
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (mapped == MAP_FAILED)
        return NULL;
    madvise(mapped, size, MADV_DONTFORK);
    return mapped;
}

/* NULL, without an exception, if the system has no io_uring, an old one, or does not allow it. */
static struct send_ring *
make_ring(void)
{
    struct io_uring_params params = {0};
    params.flags = IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    int fd = (int)syscall(SYS_io_uring_setup, SEND_AT_ONCE, &params);
    if (fd < 0)
        return NULL;
    struct send_ring *ring = PyMem_Calloc(1, sizeof(struct send_ring));
    if (ring == NULL) {
        close(fd);
        return NULL;
    }
    size_t queue = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t results = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    ring->fd = fd;
    ring->rings_size = queue > results ? queue : results;
    ring->entries_size = params.sq_entries * sizeof(struct io_uring_sqe);
    ring->rings = map_ring(fd, ring->rings_size, IORING_OFF_SQ_RING);
    ring->entries = map_ring(fd, ring->entries_size, IORING_OFF_SQES);
    if (ring->rings == NULL || ring->entries == NULL || !(params.features & IORING_FEAT_SINGLE_MMAP)) {
        close_ring(ring);
        return NULL;
    }
    char *base = ring->rings;
    ring->sq_head = (unsigned *)(base + params.sq_off.head);
    ring->sq_tail = (unsigned *)(base + params.sq_off.tail);
    ring->sq_mask = *(unsigned *)(base + params.sq_off.ring_mask);
    ring->cq_head = (unsigned *)(base + params.cq_off.head);
    ring->cq_tail = (unsigned *)(base + params.cq_off.tail);
    ring->cq_mask = *(unsigned *)(base + params.cq_off.ring_mask);
    ring->results = (struct io_uring_cqe *)(base + params.cq_off.cqes);
    /* Entry i of the queue is always entry i of the array. */
    unsigned *array = (unsigned *)(base + params.sq_off.array);
    for (unsigned i = 0; i < params.sq_entries; i++)
        array[i] = i;
    return ring;
}

/* As send() for each of at most SEND_AT_ONCE sockets, but gives negative error numbers. The first ones alone if the
 * ring fails; gives how many. */
static Py_ssize_t
ring_send(struct send_ring *ring, const int *fds, Py_ssize_t count, const char *data, Py_ssize_t size, Py_ssize_t *sent)
{
    unsigned first = *ring->sq_tail, left = (unsigned)count, waiting = 0;
    for (unsigned i = 0; i < left; i++) {
        struct io_uring_sqe *entry = &ring->entries[(first + i) & ring->sq_mask];
        memset(entry, 0, sizeof(*entry));
        entry->opcode = IORING_OP_SEND;
        entry->fd = fds[i];
        entry->addr = (uint64_t)(uintptr_t)data;
        entry->len = (unsigned)size;
        entry->msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL;
        entry->user_data = i;
    }
    __atomic_store_n(ring->sq_tail, first + left, __ATOMIC_RELEASE);
    int has_failed = 0;
    while (waiting || (left && !has_failed)) {
        unsigned more = has_failed ? 0 : left;
        long taken = syscall(SYS_io_uring_enter, ring->fd, more, more + waiting, IORING_ENTER_GETEVENTS, NULL, 0);
        if (taken < 0)
            has_failed = errno != EINTR;
        else {
            left -= (unsigned)taken;
            waiting += (unsigned)taken;
        }
        unsigned head = *ring->cq_head, end = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
        for (; head != end; head++, waiting--) {
            struct io_uring_cqe *result = &ring->results[head & ring->cq_mask];
            sent[result->user_data] = result->res;
        }
        __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
    }
    /* What the system has not taken must not be sent later. */
    __atomic_store_n(ring->sq_tail, first + (unsigned)count - left, __ATOMIC_RELEASE);
    return count - left;
}
#endif

PyDoc_STRVAR(open_ring_doc,
"open_ring() -> ring or None\n\n"
"Something that send_each() sends with, in the thread that has opened it. It closes when nothing refers to it.\n"
"None if the system has no io_uring, or does not allow it.");

static PyObject *
open_ring(PyObject *module, PyObject *unused)
{
#ifdef HAVE_RING
    struct send_ring *ring = make_ring();
    if (ring != NULL) {
        PyObject *capsule = PyCapsule_New(ring, RING_NAME, free_ring);
        if (capsule == NULL)
            close_ring(ring);
        return capsule;
    }
#endif
    Py_RETURN_NONE;
}

PyDoc_STRVAR(send_each_doc,
"send_each(descriptors, data, ring) -> [(index, sent), ...]\n\n"
"Write the same bytes to each of a list of sockets, without waiting for any. Gives the sockets that did not\n"
"take all of them, with the number of bytes taken: 0 if there was an error, which the next write meets again.\n"
"`ring` is from open_ring(), or None.");

static PyObject *
send_each(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyList_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "send_each(list, bytes, ring)");
        return NULL;
    }
    void *ring = args[2] == Py_None ? NULL : PyCapsule_GetPointer(args[2], RING_NAME);
    if (ring == NULL && PyErr_Occurred())
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(args[0]);
    const char *data = PyBytes_AS_STRING(args[1]);
    Py_ssize_t size = PyBytes_GET_SIZE(args[1]);
    PyObject *left = PyList_New(0);
    int *fds = PyMem_Malloc((size_t)(count + 1) * sizeof(int));
    Py_ssize_t *sent = PyMem_Malloc((size_t)(count + 1) * sizeof(Py_ssize_t));
    if (left == NULL || fds == NULL || sent == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long fd = PyLong_AsLong(PyList_GET_ITEM(args[0], i));
        if (fd == -1 && PyErr_Occurred())
            goto failed;
        fds[i] = (int)fd;
    }
    Py_BEGIN_ALLOW_THREADS
    Py_ssize_t tried = 0;
#ifdef HAVE_RING
    while (ring != NULL && count - tried > 1) {
        Py_ssize_t wanted = count - tried < SEND_AT_ONCE ? count - tried : SEND_AT_ONCE;
        Py_ssize_t taken = ring_send(ring, fds + tried, wanted, data, size, sent + tried);
        tried += taken;
        if (taken < wanted)
            break;
    }
#endif
    for (Py_ssize_t i = tried; i < count; i++) {
        do
            sent[i] = send(fds[i], data, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (sent[i] < 0 && errno == EINTR);
    }
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        if (sent[i] == size)
            continue;
        PyObject *pair = Py_BuildValue("nn", i, sent[i] < 0 ? 0 : sent[i]);
        if (pair == NULL || PyList_Append(left, pair)) {
            Py_XDECREF(pair);
            goto failed;
        }
        Py_DECREF(pair);
    }
    PyMem_Free(fds);
    PyMem_Free(sent);
    return left;
failed:
    PyMem_Free(fds);
    PyMem_Free(sent);
    Py_XDECREF(left);
    return NULL;
}

#ifdef __linux__
PyDoc_STRVAR(read_publishes_doc,
"read_publishes(epoll, line, max_size) -> (descriptors, bodies, others)\n\n"
"Read once from each readable socket of an epoll, without waiting. Gives the sockets that sent that line and one\n"
"size-prefixed message of an allowed size, their messages, and for all others (descriptor, bytes read), which\n"
"are empty at the end of a stream and after an error. Reads at most 64 sockets, and 4 KiB of each.");

static int
append_other(PyObject *others, int fd, const char *data, Py_ssize_t size)
{
    PyObject *pair = Py_BuildValue("iy#", fd, data, size);
    int failed = pair == NULL || PyList_Append(others, pair);
    Py_XDECREF(pair);
    return failed;
}

static int
append_publish(PyObject *descriptors, PyObject *bodies, int fd, const char *body, Py_ssize_t size)
{
    PyObject *number = PyLong_FromLong(fd), *bytes = PyBytes_FromStringAndSize(body, size);
    int failed = number == NULL || bytes == NULL || PyList_Append(descriptors, number) || PyList_Append(bodies, bytes);
    Py_XDECREF(number);
    Py_XDECREF(bytes);
    return failed;
}

static PyObject *
read_publishes(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "read_publishes(int, bytes, int)");
        return NULL;
    }
    long epoll = PyLong_AsLong(args[0]);
    if (epoll == -1 && PyErr_Occurred())
        return NULL;
    const char *line = PyBytes_AS_STRING(args[1]);
    Py_ssize_t width = PyBytes_GET_SIZE(args[1]);
    long long max_size = PyLong_AsLongLong(args[2]);
    if (max_size == -1 && PyErr_Occurred())
        return NULL;
    struct epoll_event events[READ_AT_ONCE];
    int count = epoll_wait((int)epoll, events, READ_AT_ONCE, 0);
    if (count < 0 && errno != EINTR)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (count < 0)
        count = 0;
    Py_ssize_t sizes[READ_AT_ONCE];
    char *buffer = PyMem_Malloc((size_t)count * READ_BYTES + 1);
    PyObject *descriptors = PyList_New(0), *bodies = PyList_New(0), *others = PyList_New(0);
    if (buffer == NULL)
        PyErr_NoMemory();
    if (buffer == NULL || descriptors == NULL || bodies == NULL || others == NULL)
        goto failed;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < count; i++) {
        do
            sizes[i] = recv(events[i].data.fd, buffer + (size_t)i * READ_BYTES, READ_BYTES, MSG_DONTWAIT);
        while (sizes[i] < 0 && errno == EINTR);
        if (sizes[i] < 0)
            sizes[i] = errno == EAGAIN || errno == EWOULDBLOCK ? -1 : 0;
    }
    Py_END_ALLOW_THREADS
    for (int i = 0; i < count; i++) {
        if (sizes[i] < 0)
            continue;
        int fd = events[i].data.fd;
        const char *data = buffer + (size_t)i * READ_BYTES;
        Py_ssize_t size = lone_publish(data, sizes[i], line, width, max_size);
        if (size < 0 ? append_other(others, fd, data, sizes[i])
                     : append_publish(descriptors, bodies, fd, data + width + 4, size))
            goto failed;
    }
    PyMem_Free(buffer);
    return Py_BuildValue("NNN", descriptors, bodies, others);
failed:
    PyMem_Free(buffer);
    Py_XDECREF(descriptors);
    Py_XDECREF(bodies);
    Py_XDECREF(others);
    return NULL;
}
#endif

static PyMethodDef methods[] = {
    {"pack_messages", (PyCFunction)(void (*)(void))pack_messages, METH_FASTCALL, pack_messages_doc},
    {"take_publishes", (PyCFunction)(void (*)(void))take_publishes, METH_FASTCALL, take_publishes_doc},
    {"encode_mpub", (PyCFunction)(void (*)(void))encode_mpub, METH_FASTCALL, encode_mpub_doc},
    {"split_headers", (PyCFunction)(void (*)(void))split_headers, METH_FASTCALL, split_headers_doc},
    {"encode_headers", encode_headers, METH_O, encode_headers_doc},
    {"decode_headers", decode_headers, METH_O, decode_headers_doc},
    {"lazy_headers", (PyCFunction)(void (*)(void))lazy_headers, METH_FASTCALL, lazy_headers_doc},
    {"encode_with_headers", (PyCFunction)(void (*)(void))encode_with_headers, METH_FASTCALL, encode_with_headers_doc},
    {"count_numbers", (PyCFunction)(void (*)(void))count_numbers, METH_FASTCALL, count_numbers_doc},
    {"build_frames", (PyCFunction)(void (*)(void))build_frames, METH_FASTCALL, build_frames_doc},
    {"decode_messages", (PyCFunction)(void (*)(void))decode_messages, METH_FASTCALL, decode_messages_doc},
    {"decode_fins", (PyCFunction)(void (*)(void))decode_fins, METH_FASTCALL, decode_fins_doc},
    {"encode_singles", (PyCFunction)(void (*)(void))encode_singles, METH_FASTCALL, encode_singles_doc},
    {"unpack_batches", (PyCFunction)(void (*)(void))unpack_batches, METH_FASTCALL, unpack_batches_doc},
    {"unpack_headers", (PyCFunction)(void (*)(void))unpack_headers, METH_FASTCALL, unpack_headers_doc},
    {"open_ring", open_ring, METH_NOARGS, open_ring_doc},
    {"send_each", (PyCFunction)(void (*)(void))send_each, METH_FASTCALL, send_each_doc},
#ifdef __linux__
    {"read_publishes", (PyCFunction)(void (*)(void))read_publishes, METH_FASTCALL, read_publishes_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "nsparq._kernel",
    .m_doc = "Compiled inner loops; see nsparq.kernel.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__kernel(void)
{
    init_crc_table();
    init_name_characters();
    PyObject *array = PyImport_ImportModule("array");
    if (array == NULL)
        return NULL;
    array_type = PyObject_GetAttrString(array, "array");
    Py_DECREF(array);
    if (array_type == NULL)
        return NULL;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2"))
        crc32c = crc32c_instruction;
#endif
    return PyModuleDef_Init(&definition);
}
