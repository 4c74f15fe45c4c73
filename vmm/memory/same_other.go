//go:build !amd64

package memory

import "bytes"

func samePage(a, b []byte) bool { return bytes.Equal(a[:PageSize], b[:PageSize]) }
