package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/forkvm/forkvm/agent/proto"
)

// defaultPath is the PATH of a command that brings none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// maxArgument is the longest single argument or environment entry that
// execve(2) takes, without its final NUL (MAX_ARG_STRLEN is 32 pages).
const maxArgument = 32*4096 - 1

// command is an ExecRequest with everything looked up.
type command struct {
	path       string
	argv, env  []string
	dir        string
	credential *syscall.Credential // nil: as the agent
	limits     []limit
}

// refusal is a command that cannot be invoked: the request was fine, the
// outcome is 126 or 127.
type refusal struct {
	exitCode int
	cause    *proto.Error
}

func (r *refusal) Error() string { return r.cause.Error() }

func refuse(exitCode int, code, format string, a ...any) error {
	return &refusal{exitCode: exitCode, cause: failure(code, format, a...)}
}

// resolve checks a request against this guest. The error is a *refusal, or a
// *proto.Error for a request that makes no sense anywhere.
func resolve(r proto.ExecRequest) (command, error) {
	c := command{argv: proto.Strings(r.Args), dir: string(r.Dir)}
	if len(c.argv) == 0 || c.argv[0] == "" {
		return c, failure(proto.CodeInvalidRequest, "no command")
	}
	who := account{name: "root", home: "/root", uid: uint32(os.Getuid()), gid: uint32(os.Getgid())}
	if r.User != "" {
		var err error
		if who, err = lookupAccount(r.User); err != nil {
			return c, refuse(proto.ExitNotExecutable, proto.CodeUserNotFound, "%s", asError(err).Message)
		}
		c.credential = &syscall.Credential{Uid: who.uid, Gid: who.gid, Groups: who.groups}
	}
	if err := c.addGroups(r.Groups); err != nil {
		return c, err
	}
	var err error
	if c.limits, err = resolveLimits(r.Limits); err != nil {
		return c, err
	}
	c.env = environment(r, who)
	if err := checkStrings(c); err != nil {
		return c, err
	}
	if err := c.findDir(who); err != nil {
		return c, err
	}
	return c, c.findPath()
}

// addGroups adds supplementary groups to those of the user.
func (c *command) addGroups(names []string) error {
	for _, name := range names {
		gid, err := lookupGroup(name)
		if err != nil {
			return refuse(proto.ExitNotExecutable, proto.CodeUserNotFound, "%s", asError(err).Message)
		}
		if c.credential == nil {
			c.credential = &syscall.Credential{Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}
		}
		c.credential.Groups = append(c.credential.Groups, gid)
	}
	return nil
}

// environment is the default one with the request's entries over it; the last
// of several with the same name counts.
func environment(r proto.ExecRequest, who account) []string {
	var env []string
	if !r.ClearEnv {
		env = append(env, "PATH="+defaultPath, "HOME="+who.home)
		if who.name != "" {
			env = append(env, "USER="+who.name, "LOGNAME="+who.name)
		}
	}
	at := map[string]int{}
	for i, e := range env {
		name, _, _ := strings.Cut(e, "=")
		at[name] = i
	}
	for _, e := range proto.Strings(r.Env) {
		name, _, _ := strings.Cut(e, "=")
		if i, ok := at[name]; ok {
			env[i] = e
			continue
		}
		at[name] = len(env)
		env = append(env, e)
	}
	return env
}

func checkStrings(c command) error {
	lists := []struct {
		what string
		list []string
	}{{"argument", c.argv}, {"environment entry", c.env}, {"directory", []string{c.dir}}}
	for _, l := range lists {
		for i, s := range l.list {
			if strings.IndexByte(s, 0) >= 0 {
				return failure(proto.CodeInvalidRequest, "%s %d contains a NUL byte", l.what, i)
			}
			if len(s) > maxArgument {
				return refuse(proto.ExitNotExecutable, proto.CodeArgumentTooLong,
					"%s %d has %d bytes, Linux takes %d at most", l.what, i, len(s), maxArgument)
			}
		}
	}
	return nil
}

// findDir checks the working directory first: execve and chdir fail with the
// same numbers, and afterwards nobody could tell which it was.
func (c *command) findDir(who account) error {
	if c.dir == "" {
		c.dir = who.home
		if info, err := os.Stat(c.dir); err != nil || !info.IsDir() {
			c.dir = "/"
		}
		return nil
	}
	if !filepath.IsAbs(c.dir) {
		c.dir = "/" + c.dir
	}
	info, err := os.Stat(c.dir)
	if err == nil && !info.IsDir() {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return refuse(proto.ExitNotExecutable, proto.CodeDirectoryNotFound, "working directory %q: %v", c.dir, rootCause(err))
	}
	return nil
}

// findPath looks the program up as execvp(3) does, with the command's own PATH
// and directory.
func (c *command) findPath() error {
	name := c.argv[0]
	if strings.Contains(name, "/") {
		c.path = name
		return checkProgram(c.in(name), name)
	}
	path := ""
	for _, e := range c.env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v
		}
	}
	outcome := refuse(proto.ExitNotFound, proto.CodeCommandNotFound, "command %.200q is not in PATH (%.500s)", name, path)
	for dir := range strings.SplitSeq(path, ":") {
		candidate := filepath.Join(c.in(dir), name)
		err := checkProgram(candidate, name)
		if err == nil {
			c.path = candidate
			return nil
		}
		// A file that is there but does not run is the better answer.
		var r *refusal
		if errors.As(err, &r) && r.exitCode == proto.ExitNotExecutable {
			outcome = err
		}
	}
	return outcome
}

// in makes a path absolute that is relative to the working directory.
func (c *command) in(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(c.dir, path)
}

func checkProgram(path, name string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
		return refuse(proto.ExitNotFound, proto.CodeCommandNotFound, "command %.200q does not exist", name)
	case err != nil:
		return refuse(proto.ExitNotExecutable, proto.CodeCommandNotExecutable, "command %.200q: %v", name, rootCause(err))
	case info.IsDir():
		return refuse(proto.ExitNotExecutable, proto.CodeCommandNotExecutable, "command %.200q is a directory", name)
	case info.Mode().Perm()&0o111 == 0:
		return refuse(proto.ExitNotExecutable, proto.CodeCommandNotExecutable, "command %.200q is not executable", name)
	}
	return nil
}

// startError explains why the kernel did not start a command that resolve
// found nothing wrong with.
func startError(c command, err error) error {
	name := c.argv[0]
	var typed *proto.Error
	switch {
	case errors.As(err, &typed):
		return typed
	case errors.Is(err, syscall.E2BIG):
		return refuse(proto.ExitNotExecutable, proto.CodeArgumentTooLong,
			"arguments and environment have %d bytes together, more than this guest takes (a quarter of the stack limit, usually 2 MiB)", stringBytes(c))
	case errors.Is(err, syscall.ENOENT):
		return refuse(proto.ExitNotExecutable, proto.CodeCommandNotExecutable, "command %.200q: its interpreter or loader does not exist", name)
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		e := failure(proto.CodeResourceExhausted, "start command %.200q: %v", name, rootCause(err))
		e.Retryable = true
		return e
	}
	return refuse(proto.ExitNotExecutable, proto.CodeCommandNotExecutable, "command %.200q: %v", name, rootCause(err))
}

// stringBytes is the size of what execve copies, with the NULs.
func stringBytes(c command) int {
	n := 0
	for _, list := range [][]string{c.argv, c.env} {
		for _, s := range list {
			n += len(s) + 1
		}
	}
	return n
}

// rootCause strips paths and calls off an error that names them again.
func rootCause(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}
