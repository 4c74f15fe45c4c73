package output

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// units of sizes: powers of 1024, as everywhere where memory is meant.
const units = "KMGTPE"

// Bytes is a size in bytes that a flag sets: "6G", "512M", "1.5g", "4096".
type Bytes uint64

// Set is for package pflag.
func (b *Bytes) Set(s string) error {
	n, err := ParseSize(s)
	if err != nil {
		return err
	}
	*b = Bytes(n)
	return nil
}

func (b *Bytes) String() string {
	if *b == 0 {
		return "0"
	}
	return strings.TrimSuffix(strings.ReplaceAll(Size(int64(*b)), " ", ""), "iB")
}

// Type is for package pflag.
func (b *Bytes) Type() string { return "size" }

// ParseSize reads a size: a number with a suffix K, M, G, T, P or E, a power of
// 1024, and an optional B or iB behind it; without a suffix it is bytes. A
// fraction must come out as whole bytes.
func ParseSize(s string) (uint64, error) {
	number, shift := strings.TrimSpace(s), 0
	upper := strings.ToUpper(number)
	upper = strings.TrimSuffix(strings.TrimSuffix(upper, "B"), "I")
	if n := len(upper); n > 0 {
		if i := strings.IndexByte(units, upper[n-1]); i >= 0 {
			shift, upper = 10*(i+1), upper[:n-1]
		} else if len(upper) < len(number)-1 {
			return 0, fmt.Errorf("%q is no size", s) // "12iB"
		}
	}
	upper = strings.TrimSpace(upper)
	if whole, err := strconv.ParseUint(upper, 10, 64); err == nil {
		if whole > math.MaxInt64>>shift {
			return 0, fmt.Errorf("%q is too large", s)
		}
		return whole << shift, nil
	}
	// Only digits and one point: no signs, exponents, infinities.
	if strings.Trim(upper, "0123456789.") != "" || upper == "" {
		return 0, fmt.Errorf("%q is no size: a number and K, M, G or T is needed, such as 512M", s)
	}
	f, err := strconv.ParseFloat(upper, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is no size", s)
	}
	f = math.Ldexp(f, shift)
	if f != math.Trunc(f) {
		return 0, fmt.Errorf("%q is no whole number of bytes", s)
	}
	if f >= math.MaxInt64 {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return uint64(f), nil
}

// Size is a number of bytes for people: three digits and a unit.
func Size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, unit := float64(n)/1024, 0
	for f >= 1023.95 && unit < len(units)-1 {
		f /= 1024
		unit++
	}
	text := strconv.FormatFloat(f, 'f', 1, 64)
	text = strings.TrimSuffix(text, ".0")
	return fmt.Sprintf("%s %ciB", text, units[unit])
}

// Age is how long ago something was, for people.
func Age(d time.Duration) string {
	for _, step := range []struct {
		unit time.Duration
		name string
	}{
		{24 * time.Hour, "day"},
		{time.Hour, "hour"},
		{time.Minute, "minute"},
	} {
		if n := d / step.unit; n > 0 {
			return fmt.Sprintf("%d %s%s ago", n, step.name, plural(n))
		}
	}
	n := max(d/time.Second, 0)
	return fmt.Sprintf("%d second%s ago", n, plural(n))
}

func plural(n time.Duration) string {
	if n == 1 {
		return ""
	}
	return "s"
}
