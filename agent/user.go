package agent

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/forkvm/forkvm/agent/proto"
)

// account is who a command runs as.
type account struct {
	name   string
	home   string
	uid    uint32
	gid    uint32
	groups []uint32
}

// maxLine bounds one line of /etc/passwd and /etc/group; longer ones end the
// search.
const maxLine = 256 << 10

// lookupAccount resolves "user" or "user:group", each a name or a number, in
// the files of the guest. Numbers need no entry. Without a group the user's
// primary and supplementary ones apply; with one, only that.
func lookupAccount(spec string) (account, error) {
	passwd, err := openOptional("/etc/passwd")
	if err != nil {
		return account{}, err
	}
	defer passwd.Close()
	group, err := openOptional("/etc/group")
	if err != nil {
		return account{}, err
	}
	defer group.Close()
	return resolveAccount(spec, passwd, group)
}

// lookupGroup resolves a group's name or number.
func lookupGroup(name string) (uint32, error) {
	group, err := openOptional("/etc/group")
	if err != nil {
		return 0, err
	}
	defer group.Close()
	return findGroup(group, name)
}

func openOptional(path string) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return io.NopCloser(strings.NewReader("")), nil
	}
	return f, err
}

func resolveAccount(spec string, passwd, group io.Reader) (account, error) {
	user, groupName, hasGroup := strings.Cut(spec, ":")
	a := account{home: "/"}
	number, isNumber := parseID(user)
	found, err := findAccount(&a, passwd, user, number, isNumber)
	if err != nil {
		return account{}, err
	}
	switch {
	case found:
	case isNumber:
		a.uid = number
		a.gid = 0
	default:
		return account{}, failure(proto.CodeUserNotFound, "user %.80q is not in /etc/passwd", user)
	}
	if hasGroup {
		a.gid, err = findGroup(group, groupName)
		return a, err
	}
	if a.name != "" {
		a.groups, err = memberships(group, a.name)
	}
	return a, err
}

// findAccount reads passwd(5): name:password:uid:gid:comment:home:shell. A name
// has precedence over a number that looks the same.
func findAccount(a *account, passwd io.Reader, user string, number uint32, isNumber bool) (bool, error) {
	found := false
	err := eachLine(passwd, func(f []string) bool {
		if len(f) < 6 || f[0] == "" {
			return true
		}
		uid, ok1 := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if !ok1 || !ok2 {
			return true
		}
		byName := f[0] == user
		if byName || isNumber && uid == number && !found {
			*a = account{name: f[0], home: f[5], uid: uid, gid: gid}
			if a.home == "" {
				a.home = "/"
			}
			found = true
		}
		return !byName
	})
	return found, err
}

// findGroup reads group(5): name:password:gid:members.
func findGroup(group io.Reader, name string) (uint32, error) {
	number, isNumber := parseID(name)
	gid, found := number, isNumber
	err := eachLine(group, func(f []string) bool {
		id, ok := uint32(0), false
		if len(f) >= 3 && f[0] == name && name != "" {
			id, ok = parseID(f[2])
		}
		if ok {
			gid, found = id, true
		}
		return !ok
	})
	if err == nil && !found {
		err = failure(proto.CodeUserNotFound, "group %.80q is not in /etc/group", name)
	}
	return gid, err
}

func memberships(group io.Reader, user string) ([]uint32, error) {
	var gids []uint32
	err := eachLine(group, func(f []string) bool {
		if len(f) < 4 || !slices.Contains(strings.Split(f[3], ","), user) {
			return true
		}
		// The kernel takes 65,536 groups (NGROUPS_MAX).
		if gid, ok := parseID(f[2]); ok && len(gids) < 65536 {
			gids = append(gids, gid)
		}
		return true
	})
	return gids, err
}

func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	// -1 means "leave as it is" to the kernel.
	return uint32(n), err == nil && n != 1<<32-1
}

// eachLine calls fn with the colon-separated fields of each line until it
// returns false.
func eachLine(r io.Reader, fn func(fields []string) bool) error {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 4096), maxLine)
	for s.Scan() {
		if line := s.Text(); line != "" && line[0] != '#' && !fn(strings.Split(line, ":")) {
			return nil
		}
	}
	return s.Err()
}
