/* formats/status.h - the one error convention of spk.
 *
 *   - A function that can fail returns spk_status; SPK_OK is 0.  Results come back through pointers.
 *   - `err` is the last argument and may be NULL.  It is filled once, where the error is found;
 *     callers hand it on untouched.  It is never allocated.
 *   - On failure outputs are untouched unless documented otherwise, and nothing leaks.
 *   - Values are stable: they reach exit messages and tests.  Add, never renumber.
 *   - A wrong argument from our own code is an assert(), never a status; anything that came from a
 *     file or a user is a status, never an assert().
 *
 * Libraries never print and never exit; the *_main.c files do both.
 */
#ifndef SPK_STATUS_H
#define SPK_STATUS_H

typedef enum {
    SPK_OK            = 0,
    SPK_E_IO          = 10, /* the system said no; text has the path and strerror */
    SPK_E_MEMORY      = 11,
    SPK_E_EXISTS      = 12, /* refuses to replace a file */
    SPK_E_SPACE       = 13, /* too little room on the disk; text has needed and available */
    SPK_E_MAGIC       = 20, /* not this kind of file */
    SPK_E_VERSION     = 21, /* this kind of file, but of a version that we do not read */
    SPK_E_CORRUPT     = 22, /* breaks a rule of its format */
    SPK_E_CHECKSUM    = 23,
    SPK_E_LIMIT       = 24, /* well-formed, but beyond a named limit */
    SPK_E_SHAPE       = 30, /* a shape that the operation cannot take */
    SPK_E_NONFINITE   = 31, /* NaN or infinity where numbers must be finite */
    SPK_E_MISSING     = 32, /* a tensor, key or file that must be there is not */
    SPK_E_MISMATCH    = 33, /* two things that must agree do not (rule and tensor, imatrix and model) */
    SPK_E_UNSUPPORTED = 40, /* valid, but this build or machine cannot do it */
    SPK_E_USAGE       = 41  /* a user's text does not parse: option value, recipe, token list */
} spk_status;

/* One line without a newline: file, place, found, expected. */
typedef struct {
    spk_status status;
    char       text[480];
} spk_error;

#define SPK_MUST_CHECK __attribute__((warn_unused_result))

/* "SPK_E_CORRUPT"; never NULL. */
const char *spk_status_name(spk_status status);

/* Fills *err unless err is NULL; returns status, so that `return spk_fail(...)` is the idiom.
 * What is not plain in the result (formats/plain.h) is escaped, since names come from files; a text that is too long loses
 * its middle, not its end. */
spk_status spk_fail(spk_error *err, spk_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The one change that *err, filled by a call, may get: `where`, the file, in front, if the function that found the error knows
 * parts of a file but not its name.  Returns status; nothing happens if it is SPK_OK. */
spk_status spk_fail_in(const char *where, spk_status status, spk_error *err);

/* Only in functions that own nothing; others use `goto out` and one clean-up block. */
#define SPK_TRY(call)                                  \
    do {                                               \
        spk_status spk_try_status_ = (call);           \
        if (spk_try_status_ != SPK_OK) return spk_try_status_; \
    } while (0)

#endif
