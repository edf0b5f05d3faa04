/* The reference's TLS: what a native client does for each part, and nothing else. */
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

/* NULL if the server can't be trusted. */
SSL *tls_open(int fd, const char *bundle)
{
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_load_verify_locations(context, bundle, NULL);
    SSL *tls = SSL_new(context);
    SSL_CTX_free(context);
    X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls), "127.0.0.1");
    SSL_set_fd(tls, fd);
    if (SSL_connect(tls) != 1) {
        SSL_free(tls);
        return NULL;
    }
    /* one system call for eight records, not two for each */
    BIO *buffer = BIO_new(BIO_f_buffer()), *plain = SSL_get_rbio(tls);
    BIO_set_read_buffer_size(buffer, 128 * 1024);
    BIO_up_ref(plain);
    SSL_set0_rbio(tls, BIO_push(buffer, plain));
    return tls;
}

/* Returns 1 when all of it is on its way. */
int tls_send(SSL *tls, const char *data, size_t size)
{
    size_t sent;
    return SSL_write_ex(tls, data, size, &sent);
}

/* Receives until `least` bytes are there, at most `size`; returns how many. */
size_t tls_receive(SSL *tls, char *data, size_t size, size_t least)
{
    size_t done = 0, count;
    do {
        if (SSL_read_ex(tls, data + done, size - done, &count) != 1)
            break;
        done += count;
    } while (done < least);
    return done;
}

void tls_close(SSL *tls)
{
    SSL_free(tls);
}
