package lab

import (
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Config says what lab machine to boot. The zero value is a machine of one processor with an empty /usr/local/bin.
type Config struct {
	CPUs      int    // 0: 1; more share one of yours
	MemoryMiB int    // 0: 8192
	Counted   bool   // the clock stands still when the machine is idle, and all is repeatable; one processor only
	Kernel    string // package file or unpacked package; "": Debian's 6.12 cloud kernel
	CacheDir  string // "": DefaultCacheDir

	// Programs are files of this machine that appear in /usr/local/bin.
	Programs []string
	// In are files and directories of this machine; each appears below /in under its base name, as a copy that the
	// machine may change. Contents are copied to a cached image when they have changed since the last time.
	In []string
	// Tools are names of programs of this machine that are taken along with the libraries they need, such as "strace".
	Tools []string

	// BootTimeout bounds the time until the machine is ready for its first command; 0 is two minutes, for hosts under load.
	BootTimeout time.Duration
	// Log, when not nil, gets the machine's console.
	Log io.Writer
}

const (
	defaultCPUs        = 1
	defaultMemoryMiB   = 8192
	minMemoryMiB       = 512
	defaultBootTimeout = 2 * time.Minute
)

// Environment variables that FromEnvironment reads. They are the lab's user interface with make.
const (
	EnvCPUs    = "LAB_CPUS"
	EnvMemory  = "LAB_MEM"
	EnvCounted = "LAB_ICOUNT"
	EnvKernel  = "LAB_KERNEL"
	EnvIn      = "LAB_IN"
	EnvTools   = "LAB_TOOLS"
	EnvOut     = "LAB_OUT"
	EnvTimeout = "LAB_TIMEOUT"
	EnvPass    = "LAB_ENV"
	EnvVerbose = "LAB_VERBOSE"
)

// FromEnvironment reads the machine's configuration from LAB_… variables.
func FromEnvironment(getenv func(string) string) (Config, error) {
	c := Config{
		Kernel:  getenv(EnvKernel),
		Counted: truth(getenv(EnvCounted)),
		In:      list(getenv(EnvIn)),
		Tools:   list(getenv(EnvTools)),
	}
	if text := getenv(EnvCPUs); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 64 {
			return Config{}, fmt.Errorf("read %s: %q is no number of processors", EnvCPUs, text)
		}
		c.CPUs = n
	}
	if text := getenv(EnvMemory); text != "" {
		mib, err := parseMiB(text)
		if err != nil {
			return Config{}, fmt.Errorf("read %s: %w", EnvMemory, err)
		}
		c.MemoryMiB = mib
	}
	return c.complete()
}

// complete fills in defaults and refuses what cannot be.
func (c Config) complete() (Config, error) {
	if c.CPUs == 0 {
		c.CPUs = defaultCPUs
	}
	if c.Counted && c.CPUs != 1 {
		return Config{}, fmt.Errorf("configure lab: counted time needs 1 processor, not %d", c.CPUs)
	}
	if c.MemoryMiB == 0 {
		c.MemoryMiB = defaultMemoryMiB
	}
	if c.MemoryMiB < minMemoryMiB {
		return Config{}, fmt.Errorf("configure lab: %d MiB of memory, at least %d are needed", c.MemoryMiB, minMemoryMiB)
	}
	if c.BootTimeout == 0 {
		c.BootTimeout = defaultBootTimeout
	}
	seen := make(map[string]string)
	for i, path := range c.In {
		path, err := filepath.Abs(path)
		if err != nil {
			return Config{}, err
		}
		if other, taken := seen[filepath.Base(path)]; taken {
			return Config{}, fmt.Errorf("configure lab: %s and %s would both be /in/%s", other, path, filepath.Base(path))
		}
		seen[filepath.Base(path)] = path
		c.In[i] = path
	}
	return c, nil
}

// parseMiB reads a size such as 512M or 6G; a bare number is MiB.
func parseMiB(text string) (int, error) {
	number, unit := text, 1
	switch {
	case strings.HasSuffix(text, "G"):
		number, unit = strings.TrimSuffix(text, "G"), 1024
	case strings.HasSuffix(text, "M"):
		number = strings.TrimSuffix(text, "M")
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > math.MaxInt32/unit {
		return 0, fmt.Errorf("%q is no size such as 512M or 6G", text)
	}
	return n * unit, nil
}

func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
}

func truth(text string) bool { return text != "" && text != "0" && text != "no" && text != "false" }

// ProgramsIn lists the files of a directory that can be executed, for Config.Programs. A directory that does not exist
// has none.
func ProgramsIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return nil, err
		}
		if info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			files = append(files, filepath.Join(dir, entry.Name()))
		}
	}
	return files, nil
}
