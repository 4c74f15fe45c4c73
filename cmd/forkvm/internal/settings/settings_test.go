package settings

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/failure"
)

func TestResolveOrder(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(config, []byte("data_dir = \"/file/data\"\nrun_dir = \"/file/run\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	xdg := map[string]string{"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7"}
	cases := []struct {
		name  string
		flags Flags
		uid   int
		env   map[string]string
		want  Settings
	}{
		{"root's defaults", Flags{}, 0, nil, Settings{"/var/lib/forkvm", "/run/forkvm"}},
		{"a user's defaults", Flags{}, 7, xdg, Settings{"/home/u/.local/share/forkvm", "/run/user/7/forkvm"}},
		{"XDG_DATA_HOME", Flags{}, 7, map[string]string{"XDG_DATA_HOME": "/x", "XDG_RUNTIME_DIR": "/r"}, Settings{"/x/forkvm", "/r/forkvm"}},
		{"a relative XDG directory is ignored", Flags{}, 7, map[string]string{"XDG_DATA_HOME": "x", "HOME": "/h", "XDG_RUNTIME_DIR": "/r"}, Settings{"/h/.local/share/forkvm", "/r/forkvm"}},
		{"file over default", Flags{Config: config}, 0, nil, Settings{"/file/data", "/file/run"}},
		{"file by environment", Flags{}, 0, map[string]string{EnvConfig: config}, Settings{"/file/data", "/file/run"}},
		{"environment over file", Flags{Config: config}, 0, map[string]string{EnvDataDir: "/env/data"}, Settings{"/env/data", "/file/run"}},
		{"flag over environment", Flags{DataDir: "/flag", Config: config}, 0, map[string]string{EnvDataDir: "/env"}, Settings{"/flag", "/file/run"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := Resolve(c.flags, User{UID: c.uid, Getenv: func(name string) string { return c.env[name] }})
			if err != nil {
				t.Fatal(err)
			}
			if got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestConfigErrors(t *testing.T) {
	cases := []struct{ name, text, want string }{
		{"unknown key", "data_dirs = \"/x\"", `key "data_dirs" is not known`},
		{"relative path", "data_dir = \"x\"", "not an absolute path"},
		{"no TOML", "data_dir: /x", "config.toml"},
		{"wrong type", "data_dir = 3", "data_dir"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			config := filepath.Join(t.TempDir(), "config.toml")
			if err := os.WriteFile(config, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Resolve(Flags{Config: config}, User{Getenv: func(string) string { return "" }})
			if !failure.Is(err, failure.InvalidArgument) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
	_, err := Resolve(Flags{Config: "/does/not/exist"}, User{Getenv: func(string) string { return "" }})
	if !failure.Is(err, failure.InvalidArgument) {
		t.Errorf("a file that was asked for and is missing: %v", err)
	}
}

func TestPrivateDirRefusesWhatOthersMade(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	uid := os.Getuid()
	if err := privateDir(dir, uid); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(dir, uid); err != nil {
		t.Errorf("second use: %v", err)
	}
	if err := privateDir(dir, uid+1); err == nil {
		t.Error("another user's directory was taken")
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(dir, uid); err == nil {
		t.Error("a directory that everybody can write to was taken")
	}
	link := dir + "-link"
	if err := os.Symlink("/", link); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(link, uid); err == nil {
		t.Error("a symbolic link was taken")
	}
}
