/* formats/version.h - the version of spk, in one place. */
#ifndef SPK_VERSION_H
#define SPK_VERSION_H
#define SPK_VERSION_TEXT "0.1.0"
#endif
