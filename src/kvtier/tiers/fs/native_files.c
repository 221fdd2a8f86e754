/* The files of many blocks in one call, with the interpreter released from the first to the last.

   Only what is ordinary is done here. Where anything else shows (a block that is there, no
   directory, no room, a short transfer, an interrupt, a file of another length) nothing is left
   behind, and the caller, kvtier.tiers.fs.files, does that block over, call by call: so no error
   is judged in two places.

   Stable ABI of Python 3.11. */

#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    const char *path;
    const char *temp; /* of a write */
    const struct iovec *pieces;
    int num_pieces;
    Py_ssize_t nbytes;
} Block;

/* How files are opened, made and judged; each call uses what concerns it. */
typedef struct {
    int flags, mode;
    double touch_age_s;
} How;

/* Blocks, and what keeps their memory and their paths in place while the interpreter is released. */
typedef struct {
    Py_ssize_t num_blocks;
    Block *blocks;
    char *done; /* by block */
    Py_ssize_t num_buffers;
    Py_buffer *buffers;
    struct iovec *pieces;
    PyObject *paths, *temps, *data; /* tuples */
} Batch;

static void release(Batch *batch) {
    for (Py_ssize_t i = 0; i < batch->num_buffers; i++) PyBuffer_Release(&batch->buffers[i]);
    PyMem_Free(batch->blocks);
    PyMem_Free(batch->done);
    PyMem_Free(batch->buffers);
    PyMem_Free(batch->pieces);
    Py_XDECREF(batch->paths);
    Py_XDECREF(batch->temps);
    Py_XDECREF(batch->data);
}

static PyObject *tuple_of(PyObject *sequence, Py_ssize_t length) {
    PyObject *found = PySequence_Tuple(sequence);
    if (found && PyTuple_Size(found) != length) {
        PyErr_SetString(PyExc_ValueError, "as many paths as blocks are needed");
        Py_CLEAR(found);
    }
    return found;
}

static int fill(Batch *batch, PyObject *temps, PyObject *paths, PyObject *data, int access) {
    Py_ssize_t total = 0;
    batch->num_blocks = PySequence_Size(data);
    if (batch->num_blocks < 0) return -1;
    if (!(batch->data = tuple_of(data, batch->num_blocks))) return -1;
    if (!(batch->paths = tuple_of(paths, batch->num_blocks))) return -1;
    if (temps && !(batch->temps = tuple_of(temps, batch->num_blocks))) return -1;
    for (Py_ssize_t i = 0; i < batch->num_blocks; i++) {
        Py_ssize_t length = PySequence_Size(PyTuple_GetItem(batch->data, i));
        if (length < 0) return -1;
        total += length;
    }
    batch->blocks = PyMem_Calloc((size_t)batch->num_blocks, sizeof(Block));
    batch->done = PyMem_Calloc((size_t)batch->num_blocks, 1);
    batch->buffers = PyMem_Calloc((size_t)total, sizeof(Py_buffer));
    batch->pieces = PyMem_Calloc((size_t)total, sizeof(struct iovec));
    if (!batch->blocks || !batch->done || !batch->buffers || !batch->pieces) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < batch->num_blocks; i++) {
        Block *block = &batch->blocks[i];
        PyObject *views = PyTuple_GetItem(batch->data, i);
        Py_ssize_t length = PySequence_Size(views);
        block->path = PyBytes_AsString(PyTuple_GetItem(batch->paths, i));
        if (!block->path || length < 0) return -1;
        if (temps && !(block->temp = PyBytes_AsString(PyTuple_GetItem(batch->temps, i)))) return -1;
        if (length > total - batch->num_buffers) {
            PyErr_SetString(PyExc_ValueError, "a block has more pieces than a moment ago");
            return -1;
        }
        block->pieces = &batch->pieces[batch->num_buffers];
        block->num_pieces = (int)length;
        for (Py_ssize_t k = 0; k < length; k++) {
            Py_buffer *buffer = &batch->buffers[batch->num_buffers];
            PyObject *view = PySequence_GetItem(views, k);
            int refused = !view || PyObject_GetBuffer(view, buffer, access);
            Py_XDECREF(view);
            if (refused) return -1;
            batch->pieces[batch->num_buffers].iov_base = buffer->buf;
            batch->pieces[batch->num_buffers].iov_len = (size_t)buffer->len;
            batch->num_buffers++;
            block->nbytes += buffer->len;
        }
    }
    return 0;
}

static PyObject *list_of(const char *flags, Py_ssize_t count) {
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++)
        if (PyList_SetItem(found, i, PyBool_FromLong(flags[i]))) Py_CLEAR(found);
    return found;
}

static int write_file(const Block *block, const How *how) {
    mode_t mode = (mode_t)how->mode;
    struct stat found;
    if (lstat(block->path, &found) == 0 || errno != ENOENT) return 0;
    int descriptor = open(block->temp, how->flags, mode);
    if (descriptor < 0) {
        if (errno == EINVAL) unlink(block->temp); /* it was made before O_DIRECT was refused */
        return 0;
    }
    int done = fstat(descriptor, &found) == 0 &&
               ((found.st_mode & 07777) == mode || fchmod(descriptor, mode) == 0) &&
               pwritev(descriptor, block->pieces, block->num_pieces, 0) == block->nbytes;
    /* some file systems report a full disk only when the file is closed */
    done = close(descriptor) == 0 && done && rename(block->temp, block->path) == 0;
    if (!done) unlink(block->temp);
    return done;
}

static int read_file(const Block *block, const How *how) {
    struct stat found;
    struct timespec now;
    int descriptor = open(block->path, how->flags);
    if (descriptor < 0) return 0;
    int done = fstat(descriptor, &found) == 0 && found.st_size == block->nbytes &&
               preadv(descriptor, block->pieces, block->num_pieces, 0) == block->nbytes;
    if (done && clock_gettime(CLOCK_REALTIME, &now) == 0) {
        double age_s = (double)(now.tv_sec - found.st_mtim.tv_sec) +
                       1e-9 * (double)(now.tv_nsec - found.st_mtim.tv_nsec);
        /* that a use cannot be written down must not fail it */
        if (fabs(age_s) > how->touch_age_s) (void)!futimens(descriptor, NULL);
    }
    close(descriptor);
    return done;
}

/* Whether `one` was done, for each block of `data`. */
static PyObject *each(int (*one)(const Block *, const How *), const How *how, PyObject *temps,
                      PyObject *paths, PyObject *data, int access) {
    PyObject *found = NULL;
    Batch batch = {0};
    if (fill(&batch, temps, paths, data, access) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < batch.num_blocks; i++)
            batch.done[i] = (char)one(&batch.blocks[i], how);
        Py_END_ALLOW_THREADS
        found = list_of(batch.done, batch.num_blocks);
    }
    release(&batch);
    return found;
}

static PyObject *write_files(PyObject *module, PyObject *arguments) {
    PyObject *temps, *paths, *data;
    How how = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOii", &temps, &paths, &data, &how.flags, &how.mode))
        return NULL;
    return each(write_file, &how, temps, paths, data, PyBUF_SIMPLE);
}

static PyObject *read_files(PyObject *module, PyObject *arguments) {
    PyObject *paths, *into;
    How how = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOid", &paths, &into, &how.flags, &how.touch_age_s))
        return NULL;
    return each(read_file, &how, NULL, paths, into, PyBUF_WRITABLE);
}

static PyObject *find_files(PyObject *module, PyObject *arguments) {
    PyObject *names, *kept, *found = NULL;
    int directory, failure = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iO", &directory, &names)) return NULL;
    if (!(kept = PySequence_Tuple(names))) return NULL;
    Py_ssize_t count = PyTuple_Size(kept);
    const char **texts = PyMem_Calloc((size_t)count, sizeof(char *));
    char *there = PyMem_Calloc((size_t)count, 1);
    if (!texts || !there) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (!(texts[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(kept, i), NULL))) goto end;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count && !failure; i++) {
        there[i] = faccessat(directory, texts[i], F_OK, 0) == 0;
        if (!there[i] && errno != ENOENT && errno != ENOTDIR) failure = errno;
    }
    Py_END_ALLOW_THREADS
    if (failure) {
        errno = failure;
        PyErr_SetFromErrno(PyExc_OSError);
        goto end;
    }
    found = list_of(there, count);
end:
    PyMem_Free(texts);
    PyMem_Free(there);
    Py_DECREF(kept);
    return found;
}

static PyMethodDef methods[] = {
    {"write_files", write_files, METH_VARARGS, NULL},
    {"read_files", read_files, METH_VARARGS, NULL},
    {"find_files", find_files, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "native_files",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_native_files(void) { return PyModule_Create(&definition); }
